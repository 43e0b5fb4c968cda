"""Settings that carry their bounds and one sentence of help.

A section of the configuration is a plain dataclass whose fields are declared with `setting`:

    @dataclass
    class EvalConfig:
        top_p: float = setting(1.0, "Nucleus sampling threshold of evaluations.", above=0, at_most=1)

`check_bounds` enforces what the fields declare, `settings` lists it for `--help`, so neither can drift from the other.
"""

import copy
import math
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from app.errors import expect

T = TypeVar("T")
SECONDS = "a number of seconds"
TEXTS = "a list of texts"
PATH = "a path such as my_package.my_module.my_function"
ADDRESS = "an address such as http://host:30000"
NOUNS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "entries, each added as +<setting>.<name>=<value>",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a numeric setting. A limit that is None is absent; NaN is outside of every range.

    >>> Bounds(above=0, at_most=1).phrase, Bounds(above=0, at_most=1).contains(0)
    ('above 0 and up to 1', False)
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False  # whether infinity is inside, as no limit

    def contains(self, value: float) -> bool:
        return (
            (isinstance(value, int) or math.isfinite(value) or (self.infinite and value == math.inf))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def phrase(self) -> str:
        """The range in words, to follow a noun; empty without limits."""
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least} to {self.at_most}"

        limits = {"of at least": self.at_least, "above": self.above, "up to": self.at_most, "below": self.below}
        return " and ".join(f"{words} {limit}" for words, limit in limits.items() if limit is not None)


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of `--help`."""

    section: type  # the dataclass that declares it
    key: str  # dotted
    default: object
    bounds: Bounds
    accepted: str
    help: str


def setting(
    default: T,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    noun: str | None = None,
    infinite: bool = False,
) -> T:
    """Declare a field of a section.

    Args:
        default: The value of a run that does not set it. Lists and mappings are copied for each instance.
        help: One sentence on what the setting means, with its unit and the meaning of null and 0.
        noun: Accepted values in words, where the type does not say enough: "a number of seconds".
    """
    metadata = {"help": help, "bounds": Bounds(at_least, above, at_most, below, infinite), "noun": noun}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_bounds(section: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the first setting outside of its bounds, nested sections included.

    Args:
        prefix: Prepended to the names of the fields in messages: "trainer.".
    """
    for each in fields(section):
        key = prefix + each.name
        value = getattr(section, each.name)

        if is_dataclass(value):
            check_bounds(value, f"{key}.")
        elif _section_type(each) is not None:
            for name, nested in value.items():
                check_bounds(nested, f"{key}.{name}.")
        elif value is not None and each.metadata["bounds"] != Bounds():
            expect(each.metadata["bounds"].contains(value), key, value, accepted(each))


@cache
def settings(schema: Any, prefix: str = "") -> tuple[Setting, ...]:
    """List all settings below a section's dataclass, in order of declaration.

    The settings of a mapping of sections are listed once: `data.eval_sets.<name>.rows`.
    """
    found: list[Setting] = []
    for each in fields(schema):
        key = prefix + each.name
        nested = _section_type(each)

        if nested is None or get_origin(each.type) is dict:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            found.append(Setting(schema, key, default, each.metadata["bounds"], accepted(each), each.metadata["help"]))
        if nested is not None:
            found += settings(nested, f"{key}." if nested is each.type else f"{key}.<name>.")
    return tuple(found)


def accepted(declared: "Field[Any]") -> str:
    """Describe the accepted values of a field.

    "a whole number of at least 1", "null or a number of seconds above 0", "one of drain, retract, in_place".
    """
    optional = type(None) in get_args(declared.type)
    kind: Any = get_args(declared.type)[0] if optional else declared.type
    noun = declared.metadata["noun"]
    if noun is None and isinstance(kind, type) and issubclass(kind, Enum):
        noun = f"one of {', '.join(kind.__members__)}"
    if noun is None:
        noun = NOUNS[get_origin(kind) or kind]

    return f"{'null or ' if optional else ''}{noun} {declared.metadata['bounds'].phrase}".rstrip()


def check_target(section: str, target: str | None, args: object) -> None:
    """Raise `ConfigError` unless `_target_` is null or a dotted path, and for arguments without it."""
    expect(target is None or is_dotted_path(target), f"{section}._target_", target, PATH)
    expect(target is not None or not args, f"{section}.args", args, f"{{}} without {section}._target_")


def is_dotted_path(value: object) -> bool:
    """Whether a value can name a function or class: `my_package.my_module.my_reward`."""
    return isinstance(value, str) and all(word.isidentifier() for word in value.split(".")) and "." in value


def _section_type(declared: "Field[Any]") -> Any:
    """The dataclass of a field that is a section or a mapping of sections; None for a setting."""
    candidates = (declared.type, *get_args(declared.type))
    return next((each for each in candidates if is_dataclass(each)), None)
