"""Settings of `data=`: where prompts come from and how a row becomes a prompt."""

from dataclasses import dataclass, field
from enum import Enum

from app.errors import expect


class Template(Enum):
    plain = "plain"  # prefix + question + suffix, as it stands
    chat = "chat"  # the tokenizer's chat template


@dataclass
class ArithmeticConfig:
    """Generated problems `a+b=`; used where `path` is null."""

    problems: int = 2000  # training rows
    eval_problems: int = 200  # held-out rows, disjoint from the training rows
    max_operand: int = 99


@dataclass
class EvalSetConfig:
    """One evaluation set; unset fields are the training set's."""

    path: str | None = None  # null: the held-out split of the training set
    split: str = "test"
    rows: int | None = None  # the first rows only


@dataclass
class DataConfig:
    name: str = "arithmetic"
    path: str | None = None  # a JSONL or Parquet file, or a hub data set's id
    subset: str | None = None  # a hub data set's configuration
    split: str = "train"
    question: str = "question"  # field of the row; dots reach into nested fields
    answer: str = "answer"
    answer_after: str | None = None  # the answer is what follows the last occurrence of this, e.g. "####"
    template: Template = Template.plain
    prefix: str = ""
    suffix: str = ""
    system: str | None = None  # system message, chat template only
    thinking: bool = False  # the chat template's thinking mode
    shuffle: bool = True
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)  # empty: the held-out split, named "eval"
    eval_fraction: float = 0.05  # held out of the training file where no evaluation set is given


def validate(config: DataConfig) -> None:
    expect(
        config.arithmetic.problems >= 1,
        "data.arithmetic.problems",
        config.arithmetic.problems,
        "a whole number of at least 1",
    )
    expect(
        config.arithmetic.eval_problems >= 1,
        "data.arithmetic.eval_problems",
        config.arithmetic.eval_problems,
        "a whole number of at least 1",
    )
    expect(
        config.arithmetic.max_operand >= 1,
        "data.arithmetic.max_operand",
        config.arithmetic.max_operand,
        "a whole number of at least 1",
    )
    expect(0 < config.eval_fraction < 1, "data.eval_fraction", config.eval_fraction, "a number between 0 and 1")
