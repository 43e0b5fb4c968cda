"""The environment of a run: the specification of its workers, and a trial of one."""

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from app.config import RunConfig
from app.config.data import Template
from app.environment.pool import EnvironmentPool, EnvironmentSpec
from app.environment.rendering import CHAT, PLAIN, renderer_for
from app.environment.rendering.agreement import QUESTION, first_difference, other_end
from app.environment.rendering.chat import ChatRenderer
from app.environment.rendering.chat_template import ChatTemplate
from app.environment.wire import Limits, RendererChoice
from app.errors import ConfigError, RunError
from app.model.hf_directory import own_template, stop_ids
from app.utils.tasks import run_blocking

LOG = "environment.log"
SCORE = "environment"  # the reward component that takes the score of the environment


def worker_spec(config: RunConfig, model_path: Path, *, tried: bool = False) -> EnvironmentSpec:
    """Return what each worker runs. `tried`: it lists the tasks of `data=environment`."""
    settings = config.environment
    turns = (settings.max_turns, settings.max_turn_tokens, settings.max_observation_tokens)
    limits = Limits(*turns, settings.timeout_s, settings.episode_s)
    environment = {
        "kind": settings.module,
        "target": settings._target_,
        "args": dict(settings.args),
        "tools": list(settings.tools),
        "id": settings.id,
        "url": settings.url,
        "system": config.data.system,
        "prefix": config.data.prefix,
        "suffix": config.data.suffix,
        "list_tasks": tried and config.data.from_environment,
        "scored": SCORE in config.reward.components,
    }
    return EnvironmentSpec(environment, _renderer(config, model_path), limits, settings.memory_gib, settings.python)


def _renderer(config: RunConfig, model_path: Path) -> RendererChoice:
    name = CHAT if config.data.template is Template.chat else PLAIN
    thinking, template = config.environment.thinking.value, own_template(config.model)
    variables = json.dumps(config.data.chat_template_kwargs)
    return RendererChoice(name, str(model_path), thinking, config.data.thinking, template, variables)


def require_rendering(config: RunConfig, model_path: Path, tokenizer: Any) -> None:
    """Raise `ConfigError` if conversations cannot be rendered as transformers renders them, with this tokenizer."""
    choice = _renderer(config, model_path)
    variables = {"enable_thinking": choice.enable_thinking, **config.data.chat_template_kwargs}
    try:
        if choice.template is not None:
            ChatTemplate(model_path, choice.template, variables).render([QUESTION])
    except ValueError as error:
        accepted = "a Jinja template that renders a question"
        raise ConfigError("model.chat_template", config.model.chat_template, accepted, str(error)) from error

    if choice.name != CHAT:
        return
    if not config.environment.multi_turn:
        end = other_end(tokenizer, stop_ids(model_path), variables)
        if end is not None and end not in config.rollout.stop:
            stops = f"{end} as eos_token_id of its generation_config.json, rollout.stop=['{end}']"
            accepted = f"{stops}, or another template"
            why = f"its chat template ends a reply with {end}, and a completion does not end there"
            raise ConfigError("model.path", model_path, accepted, why)
        return
    try:
        renderer = renderer_for(*astuple(choice))
        assert isinstance(renderer, ChatRenderer)
        difference = first_difference(renderer, tokenizer, variables)
    except ValueError as error:
        raise ConfigError("", "", reason=str(error)) from error
    if difference:
        accepted = "another model.chat_template, or data.template=plain"
        why = f"with an environment and data.template=chat, {difference}"
        raise ConfigError("model.path", model_path, accepted, why)


def require_environment(config: RunConfig, model_path: Path) -> Sequence[Mapping[str, Any]]:
    """Start one worker, which loads the environment and the renderer, and end it.

    Returns the tasks that the environment lists, with `data.name=environment`. Raises `ConfigError`.
    """

    async def start() -> Sequence[Mapping[str, Any]]:
        spec = worker_spec(config, model_path, tried=True)
        pool = EnvironmentPool(spec, workers=1, episodes=1, log=log, warn=lambda _: None)
        try:
            await pool.start()
            rows: Sequence[Mapping[str, Any]] = pool.info["rows"] if config.data.from_environment else ()
            return rows
        except RunError as error:
            written = log.read_text(errors="replace", encoding="utf-8").split("\n") if log.exists() else []
            last = next((line.strip().rstrip(".") for line in reversed(written) if line.strip()), "")
            reason = str(error).replace(f"; log: {log}", "").removesuffix(".")  # it is gone when this is read
            raise ConfigError("", "", reason=f"{reason}; its last line: {last}" if last else reason) from error
        finally:
            pool.close()
            await asyncio.sleep(0)  # closes its pipe

    with tempfile.TemporaryDirectory(prefix="environment-") as folder:
        log = Path(folder) / LOG
        return run_blocking(start())
