"""verifiers 0.4: a taskset of tasks, and an `Env` whose agents play them by programs called harnesses."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NoReturn

from app.environment.protocol import EnvironmentFailed, Message, Policy, Task
from app.environment.rendering import renderer_for
from app.environment.rendering.agreement import SCRIPT
from app.environment.rendering.chat import EMPTY_BLOCK, ChatRenderer
from app.environment.rendering.reply_parser import TOOL
from app.environment.worker.openai_endpoint.endpoint import Connection, Endpoint
from app.utils.user_code import LoadError
from app.worker.process import log

MODEL = "policy"
RENDERERS = ("qwen3", "qwen3.5")  # of verifiers' own that are compared with the model's template
CONVERSATIONS = [
    (messages, with_tools) for _, before, after, with_tools in SCRIPT for messages in (before[:-1], (*before, *after))
]
API_KEY = "POSTTRAIN_NO_KEY"  # an environment variable that is never set: the endpoint takes no key


def own_renderer(choice: Mapping[str, Any]) -> Any:
    """Return the configuration of the `renderers` package that renders as the model's chat template does.

    verifiers renders by that package, which holds the templates of families. Raises `LoadError` if none does.
    """
    ours = renderer_for(**choice)
    if isinstance(ours, ChatRenderer) and ours.tool_syntax in RENDERERS:
        from renderers.base import create_renderer
        from renderers.configs import config_from_name

        kind = type(config_from_name(ours.tool_syntax))
        retention = "all" if choice["thinking"] == "keep" else None
        for thinking in (True, False):
            config = kind(enable_thinking=thinking, thinking_retention=retention)
            try:
                theirs = create_renderer(ours.tokenizer, config)
            except AssertionError:  # the tokenizer lacks a marker
                break
            if all(_agree(ours, theirs, messages, with_tools) for messages, with_tools in CONVERSATIONS):
                return config
    raise LoadError(
        f"verifiers renders conversations by the chat templates of {' and '.join(RENDERERS)}: give a model with one of "
        "them, and data.template=chat"
    )


def _agree(ours: ChatRenderer, theirs: Any, messages: Sequence[Message], with_tools: bool) -> bool:
    """Whether both give the same text, but for empty think blocks, which verifiers keeps."""
    tools = [dict(TOOL)] if with_tools else None
    pair = ours.opening(messages, tools), theirs.render_ids(list(messages), tools=tools, add_generation_prompt=True)
    if not any(message["role"] == "assistant" for message in messages):
        return pair[0] == pair[1]
    mine, its = (EMPTY_BLOCK.sub("", ours.tokenizer.decode(ids)) for ids in pair)
    return mine == its


class UntrainedPolicy:
    """The policy of an agent that is not trained: refused, because every reply of the policy is trained on."""

    url = ""

    def __init__(self, agent: str) -> None:
        self._agent = agent

    def count(self, name: str, amount: float = 1.0) -> None: ...

    async def __call__(self, *_: Any, **__: Any) -> NoReturn:
        await self.generate()

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise EnvironmentFailed(
            f"its agent {self._agent} is not trained, but would be played by the policy: "
            f"give it a model by environment.args.{self._agent}.client and .model"
        )


class Host:
    """A loaded environment, which plays all episodes of a worker.

    verifiers frees what an episode holds when it ends or is cancelled.
    """

    def __init__(
        self, package: str, args: Mapping[str, Any], tasks: int | None, max_turns: int, model_path: str, renderer: Any
    ) -> None:
        """Load the environment and its first `tasks`. Raises `LoadError` for no such package, or tasks without end."""
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        taskset = {**args.get("taskset", {}), "id": package}
        try:
            config = resolve_env_config({**args, "taskset": taskset})
        except ModuleNotFoundError as error:
            missing = error.name or str(error).partition(". ")[0]
            raise LoadError(f"environment.id={package} is not installed ({missing})") from error

        self.info: Mapping[str, Any] = {}  # for the driver
        self._model_path = model_path
        self._renderer = renderer
        self._env = load_environment(_with_our_limits(config, args, max_turns))
        if tasks is None and not self._env.taskset.bounded:
            raise LoadError("its tasks have no end: give their number, environment.args.tasks")
        self._tasks = list(itertools.islice(self._env.taskset, tasks))
        self._endpoint: Endpoint | None = None
        self._starting = asyncio.Lock()
        self._served = AsyncExitStack()  # until the worker's process ends

    def rows(self) -> list[dict[str, Any]]:
        """Return the tasks: index, id, question and answer."""
        return [
            {
                "index": index,
                "id": str(task.data.name or task.data.id or index),
                "question": question_of(task.data.prompt),
                "answer": str(getattr(task.data, "answer", None) or ""),
            }
            for index, task in enumerate(self._tasks)
        ]

    def __call__(self) -> "Host":
        """Return the environment of an episode."""
        return self

    async def run(self, task: Task, policy: Policy) -> dict[str, float]:
        """Play an episode; return its scores, the reward first. Raises `EpisodeOver` or `EnvironmentFailed`."""
        from verifiers.v1.clients import ModelContext, TrainClientConfig

        endpoint = await self._start()
        client = TrainClientConfig(
            base_url=endpoint.shared_url,
            api_key_var=API_KEY,
            renderer=self._renderer,
            renderer_model_name=self._model_path,
        )
        connections: list[Connection] = []

        def agent_begins(trace: Any) -> None:
            # verifiers sends the id of the trace as the session
            speaker: Policy = policy if trace.agent.trainable else UntrainedPolicy(trace.agent.name or "agent")
            connections.append(endpoint.open(speaker, session=trace.id))

        try:
            (slot,) = self._env.slots(self._tasks[int(task.row["index"])])
            episode = await self._env.run_slot(slot, ModelContext(MODEL, client), on_trace=agent_begins)
        finally:
            for connection in connections:
                endpoint.shut(connection)

        if not episode.ok:
            over = next((connection.over for connection in connections if connection.over), None)
            raise over or EnvironmentFailed(_error_of(episode))
        return _scores(episode)

    async def _start(self) -> Endpoint:
        """Start what all episodes share: verifiers' own servers, and the endpoint."""
        async with self._starting:
            if self._endpoint is None:
                await self._served.enter_async_context(self._env.serving())
                self._endpoint = Endpoint(asyncio.get_running_loop(), log)
            return self._endpoint


def _with_our_limits(config: Any, args: Mapping[str, Any], max_turns: int) -> Any:
    """Return an environment's configuration under the run's limits.

    An agent has at most `environment.max_turns` turns. Nothing is tried twice: that is the run's to decide. An agent
    whose harness runs no code of the policy needs no sandbox; without this it would get a remote one.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.configs.retries import RetryConfig
    from verifiers.v1.runtimes import PrimeConfig, SubprocessConfig
    from verifiers.v1.utils.loaders import harness_class

    harnesses = config.agent_harnesses()
    changes: dict[str, Any] = {"retries": RetryConfig()}
    for name, agent in agent_config_fields(config).items():
        limit = min(max_turns, agent.max_turns or max_turns)
        change = {"max_turns": limit, "retries": RetryConfig()}
        chosen = "runtime" in args.get(name, {}) or not isinstance(agent.runtime, PrimeConfig)
        if not chosen and not harness_class(harnesses[name].id).EXECUTES_CODE:
            change["runtime"] = SubprocessConfig()
        changes[name] = agent.model_copy(update=change)
    return config.model_copy(update=changes)


def _error_of(episode: Any) -> str:
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces if trace.last_error)]
    if not errors:
        return "verifiers reports no error and no result"
    lines = str(errors[-1].message).strip().splitlines() or [""]
    return f"{errors[-1].type}: {lines[-1]}"


def _scores(episode: Any) -> dict[str, float]:
    """Return the reward, its parts and the metrics, averaged over the runs of the one agent that is trained."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    agents = sorted({trace.agent.name or "agent" for trace in traces})
    if len(agents) != 1:
        several = f"it trains the agents {', '.join(agents)}, but an episode has one reward"
        raise EnvironmentFailed(several if agents else "none of its agents is trained")

    values: dict[str, list[float]] = {"reward": [trace.reward for trace in traces]}
    for trace in traces:
        parts = [(name, reward and reward.score) for name, reward in trace.rewards.items()]
        for name, value in (*parts, *trace.metrics.items()):
            if value is not None and name != "reward":
                values.setdefault(name, []).append(float(value))
    return {name: sum(each) / len(each) for name, each in values.items()}


def question_of(messages: object) -> str:
    """Return the last message of a prompt, for people. Prompts are text or messages."""
    if isinstance(messages, Sequence) and not isinstance(messages, str) and messages:
        last = messages[-1]
        content = last.get("content") if isinstance(last, Mapping) else getattr(last, "content", None)
        return str(content or "")
    return str(messages or "")
