"""Settings of `environment=`."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from app.config.setting import PATH, SECONDS, check_target, is_dotted_path, setting
from app.errors import expect


class EnvironmentKind(Enum):
    """Kinds of environments; each is a module of `app.environment`."""

    single_turn = "single_turn"
    tools = "tools"
    calculator = "calculator"
    verifiers = "verifiers"
    openenv = "openenv"


class Thinking(Enum):
    """Treatment of earlier reasoning at the next user message."""

    template = "template"
    keep = "keep"


@dataclass
class EnvironmentConfig:
    """The environment, its worker processes and its limits."""

    kind: EnvironmentKind = setting(
        EnvironmentKind.single_turn,
        "single_turn: one prompt and one completion; tools: your functions as tools of a chat model; calculator: the "
        "tiny task; verifiers and openenv: environments of those libraries; one of your own is environment._target_.",
    )
    _target_: str | None = setting(
        None, "Dotted path of your own environment: a class with begin and step, or with run.", noun=PATH
    )
    args: dict[str, Any] = setting(
        {},
        "Keyword arguments of environment._target_ or of the verifiers environment; what each reset of openenv gets.",
    )
    tools: list[str] = setting(
        [],
        "With environment=tools: dotted paths of functions, or of classes whose public methods are tools.",
        noun="a list of paths as in [my_tools.search,my_tools.Python]",
    )
    id: str | None = setting(None, "With environment=verifiers: the environment.", noun="the name of a package")
    url: str | None = setting(None, "With environment=openenv: the server.", noun="an address as ws://localhost:8000")
    max_turns: int = setting(8, "Most completions of the policy in an episode.", at_least=1)
    max_turn_tokens: int | None = setting(
        None, "Most tokens of one completion; null: the rest of rollout.max_completion_tokens.", at_least=1
    )
    max_observation_tokens: int = setting(2048, "A longer observation is cut in the middle, with a note.", at_least=16)
    thinking: Thinking = setting(
        Thinking.template, "Earlier reasoning at a user message: as the chat template, which strips it; or kept."
    )
    workers: int = setting(1, "Processes that run environments.", at_least=1)
    episodes: int = setting(64, "Episodes that one of these processes plays at once.", at_least=1)
    timeout_s: float = setting(
        60.0, "Deadline of one step of the environment; a tool that is late is an observation.", above=0, noun=SECONDS
    )
    episode_s: float = setting(
        1800.0, "Time after which an episode ends as it is, without waits for the policy.", above=0, noun=SECONDS
    )
    retries: int = setting(1, "New attempts of a failed episode; then it is left out of its group.", at_least=0)
    max_failed_fraction: float = setting(
        0.1, "Share of a step's episodes that may fail in every attempt; above it the run ends.", at_least=0, at_most=1
    )
    python: str | None = setting(
        None,
        "Interpreter of the worker processes, which has packages of its own; null: the application's.",
        noun="the path of a Python interpreter",
    )
    memory_gib: float = setting(8.0, "Memory that one worker process may allocate, in GiB.", above=0)

    @property
    def multi_turn(self) -> bool:
        return self.module != EnvironmentKind.single_turn.value

    @property
    def scores(self) -> bool:
        """Whether the environment may score its episodes, which `reward=environment` takes."""
        return self.module in ("own", EnvironmentKind.verifiers.value, EnvironmentKind.openenv.value)

    @property
    def module(self) -> str:
        return self.kind.value if self._target_ is None else "own"

    @property
    def choice(self) -> str:
        return f"environment={self.kind.value}" if self._target_ is None else f"environment._target_={self._target_}"

    def validate(self) -> None:
        target = self._target_
        alone = target is None or self.kind is EnvironmentKind.single_turn
        expect(alone, "environment._target_", target, f"null with environment={self.kind.value}")
        takes_args = self.module in ("own", "verifiers", "openenv")
        check_target("environment", target, {})
        expect(takes_args or not self.args, "environment.args", self.args, f"{{}} with {self.choice}")
        self._only_with(EnvironmentKind.tools, "tools", self.tools, "[my_tools.search]")
        self._only_with(EnvironmentKind.verifiers, "id", self.id, "the package of the environment")
        self._only_with(EnvironmentKind.openenv, "url", self.url, "an address such as ws://localhost:8000")
        for path in self.tools:
            expect(is_dotted_path(path), "environment.tools", path, "paths such as my_tools.search")

    def _only_with(self, kind: EnvironmentKind, name: str, value: object, example: str) -> None:
        """Expect a setting if, and only if, the environment is of this kind."""
        key = f"environment.{name}"
        expect(self.kind is not kind or bool(value), key, value, f"{example} with environment={kind.value}")
        empty = "[]" if isinstance(value, list) else "null"
        expect(self.kind is kind or not value, key, value, f"{empty} with {self.choice}")
