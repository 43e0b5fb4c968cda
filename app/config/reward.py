"""Settings of `reward=`: a weighted sum of built-in components and callables of your own."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.config.setting import PATH, SECONDS, check_target, setting
from app.errors import expect

BUILT_IN = ("exact", "format", "math", "code", "environment")  # each is a module of `app.reward`
COMPARING = ("exact", "math")  # with the answer of the row
ENTRY_KEYS = ("weight", "_target_", "args")
CODE = "code"  # the built-in component with arguments


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One entry of `reward.components`, or the reward of `reward._target_`."""

    weight: float = 1.0
    target: str | None = None  # None: built in
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CodeArgs:
    """The arguments of the component `code`."""

    partial: bool = False
    memory_mib: int = 512


CODE_ACCEPTED = {
    "partial": (lambda value: isinstance(value, bool), "true or false"),
    "memory_mib": (lambda value: type(value) is int and value >= 64, "a whole number of at least 64"),
}


@dataclass
class RewardConfig:
    """The reward function and its worker processes."""

    _target_: str | None = setting(
        None,
        "Dotted path of your own reward, in place of the preset's component; to add one, see reward.components.",
        noun=PATH,
    )
    args: dict[str, Any] = setting(
        {},
        "Keyword arguments of reward._target_; with reward=code partial (score the share of the tests) and "
        "memory_mib (512).",
    )
    components: dict[str, Any] = setting(
        {},
        "The terms of the weighted sum, by name: a weight, or weight (1 by default), _target_ and args; weight 0 "
        "measures a component without rewarding it.",
        noun=f"weights of {', '.join(BUILT_IN)}, as in +reward.components.format=0.1, and your own, as in "
        "+reward.components.style._target_=my_module.style +reward.components.style.weight=0.2",
    )
    workers: int = setting(
        1, "Worker processes of each component but exact and format; each scores one group at a time.", at_least=1
    )
    timeout_s: float = setting(
        60.0,
        "Deadline per trajectory, for math at most 5 s; a late group is scored again one by one, and "
        "what is late alone has reward 0.",
        above=0,
        noun=SECONDS,
    )
    max_failed_fraction: float = setting(
        0.2,
        "Share of a step's trajectories whose scoring may fail, with reward 0; above it the run stops.",
        at_least=0,
        at_most=1,
    )
    tryout: bool = setting(
        True, "Try your own rewards on made-up completions of a few rows before anything starts; false only loads them."
    )

    def terms(self) -> dict[str, RewardTerm]:
        """Return the components by name. The settings must be valid."""
        if self._target_ is not None:
            return {self._target_.rpartition(".")[2]: RewardTerm(target=self._target_, args=self.args)}
        terms = {}
        for name, entry in self.components.items():
            own = entry if isinstance(entry, dict) else {"weight": entry}
            args = self.args if name == CODE else own.get("args") or {}
            terms[name] = RewardTerm(float(own.get("weight", 1.0)), own.get("_target_"), args)
        return terms

    @property
    def formula(self) -> str:
        """The sum in words: `1 · math + 0.2 · short`, or the name of a single component of weight 1."""
        terms = [f"{term.weight:g} · {name}" for name, term in self.terms().items()]
        return " + ".join(terms).replace("+ -", "- ").removeprefix("1 · " if len(terms) == 1 else "")

    @property
    def code(self) -> CodeArgs | None:
        runs_code = self._target_ is None and CODE in self.components
        return CodeArgs(**self.args) if runs_code else None

    def validate(self) -> None:
        target = self._target_
        expect(target is not None or bool(self.components), "reward.components", "{}", "at least one component")
        for name, entry in self.components.items():
            _check_entry(f"reward.components.{name}", name, entry)

        runs_code = target is None and CODE in self.components
        check_target("reward", target, {} if runs_code else self.args)
        for name, value in self.args.items() if runs_code else ():
            expect(name in CODE_ACCEPTED, f"reward.args.{name}", value, f"{', '.join(CODE_ACCEPTED)} with reward=code")
            accepts, accepted = CODE_ACCEPTED[name]
            expect(accepts(value), f"reward.args.{name}", value, accepted)

        if target is not None:
            # one component of a preset is meant to be replaced
            replaced = [each for each in self.components.values() if not isinstance(each, dict)]
            accepted = f"+reward.components.{target.rpartition('.')[2]}._target_={target} to add it"
            expect(len(self.components) == len(replaced) <= 1, "reward._target_", target, accepted)


def _check_entry(key: str, name: str, entry: Any) -> None:
    entry = entry if isinstance(entry, dict) else {"weight": entry}
    for word, value in entry.items():
        example = f"weight, _target_ or args, as in +{key}.args.{word}={value}"
        expect(word in ENTRY_KEYS, f"{key}.{word}", value, example)

    weight, target, args = entry.get("weight", 1.0), entry.get("_target_"), entry.get("args") or {}
    if target is None:
        accepted = f"weights of {', '.join(BUILT_IN)}, or your own as +{key}._target_=my_module.{name}"
        expect(name in BUILT_IN, key, weight, accepted)
    number = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
    expect(number, key, weight, "a finite weight")
    expect(target is None or name not in BUILT_IN, f"{key}._target_", target, f"another name: {name} is built in")
    expect(isinstance(args, dict), f"{key}.args", args, f"entries as in +{key}.args.scale=0.5")
    check_target(key, target, args)
