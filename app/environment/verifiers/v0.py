"""verifiers 0.2.1: `load_environment()` of a module returns an environment with a data set and a rubric."""

import secrets
from collections.abc import Mapping
from typing import Any

from app.environment.protocol import Policy
from app.environment.verifiers.environment_host import (
    API_KEY,
    MODEL,
    EnvironmentFailed,
    Settings,
    new_endpoint,
    question_of,
)
from app.environment.worker.openai_endpoint.endpoint import SESSION_HEADER, Endpoint
from app.utils.dotted_path import LoadError

OF_THE_POLICY = ("EmptyModelResponseError", "InvalidModelResponseError")  # it said nothing


class HostV0:
    """An environment of verifiers 0.2.1."""

    def __init__(self, settings: Settings) -> None:
        """Load the environment.

        Raises:
            LoadError: There is no such package, or it scores groups.
        """
        import verifiers

        try:
            self._env = verifiers.load_environment(settings.package, **settings.args)
        except ValueError as error:
            if isinstance(error.__cause__, ImportError):
                raise LoadError(f"environment.id={settings.package} is not installed ({error.__cause__})") from error
            raise
        if self._env.requires_group_rollouts or self._env.provides_advantages:
            raise LoadError(
                f"{settings.package} scores whole groups, which is not supported: give one that scores each"
            )

        for env in (self._env, *getattr(self._env, "envs", ())):
            own = getattr(env, "max_turns", -1)
            env.set_kwargs(max_turns=min(settings.max_turns, own) if own > 0 else settings.max_turns)
        has_training_data = self._env.build_dataset() is not None
        self._rows = self._env.get_dataset() if has_training_data else self._env.get_eval_dataset()
        if settings.tasks is not None:
            self._rows = self._rows.select(range(min(settings.tasks, len(self._rows))))
        self._settings = settings
        self._started: tuple[Endpoint, Any, Any] | None = None

    def rows(self) -> list[dict[str, Any]]:
        columns = [name for name in ("prompt", "answer") if name in self._rows.column_names]
        return [
            {
                "index": index,
                "id": str(index),
                "question": question_of(row["prompt"]),
                "answer": str(row.get("answer") or ""),
            }
            for index, row in enumerate(self._rows.select_columns(columns))
        ]

    async def play(self, index: int, policy: Policy) -> dict[str, float]:
        from verifiers.clients.renderer_client import RendererClient

        endpoint, openai_client, renderer = await self._start()
        session = secrets.token_hex(16)
        seat = endpoint.open(policy, session=session)
        client = RendererClient(openai_client.with_options(default_headers={SESSION_HEADER: session}), renderer)
        try:
            output = await self._env.run_rollout(dict(self._rows[index]), client, MODEL, {})
        finally:
            endpoint.shut(seat)

        error = output.get("error")
        if error and error["error"] not in OF_THE_POLICY:
            raise seat.over or EnvironmentFailed(str(error["error_chain_repr"]).splitlines()[0])
        return _scores(output)

    async def _start(self) -> tuple[Endpoint, Any, Any]:
        """Return what all episodes share: the endpoint, a client of it, and a renderer."""
        if self._started is None:
            from renderers import create_renderer
            from renderers.base import load_tokenizer
            from verifiers.types import ClientConfig
            from verifiers.utils.client_utils import setup_openai_client

            endpoint = new_endpoint()
            config = ClientConfig(api_base_url=endpoint.shared_url, api_key_var=API_KEY, max_retries=0, timeout=1e9)
            renderer = create_renderer(
                load_tokenizer(self._settings.renderer["model_path"]), self._settings.renderer_config()
            )
            self._started = endpoint, setup_openai_client(config), renderer
        return self._started


def _scores(output: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward, then what its parts measured."""
    scores = {"reward": float(output.get("reward") or 0.0)}
    for name, value in (output.get("metrics") or {}).items():
        if name != "reward" and value is not None:
            scores[name] = float(value)
    return scores
