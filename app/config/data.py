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
    max_operand: int = 50


@dataclass
class EvalSetConfig:
    """One evaluation set; a field that is null is the training set's."""

    path: str | None = None  # null: this split of the training set; of a local file, its held-out rows
    subset: str | None = None
    split: str = "test"
    question: str | None = None
    answer: str | None = None
    answer_after: str | None = None  # "": the whole answer field, whatever the training set does
    rows: int | None = None  # the first rows only


@dataclass
class DataConfig:
    name: str = "arithmetic"
    path: str | None = None  # a JSONL or Parquet file, or a hub data set's id; null: generated arithmetic
    subset: str | None = None  # a hub data set's configuration
    split: str = "train"  # of a hub data set
    question: str = "question"  # field of the row; dots reach into nested fields and lists: prompt.0.content
    answer: str = "answer"
    answer_after: str | None = None  # the answer is what follows the last occurrence of this, e.g. "####"
    distinct: bool = False  # keep the first of rows with the same question and answer
    template: Template = Template.plain
    prefix: str = ""
    suffix: str = ""
    system: str | None = None  # system message, chat template only
    thinking: bool = False  # the chat template's thinking mode
    shuffle: bool = True
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)  # empty: the held-out split, named "eval"
    eval_fraction: float = 0.05  # held out of the training file where no evaluation set is given; at least 1 row


def validate(config: DataConfig) -> None:
    arithmetic = config.arithmetic
    for key in ("problems", "eval_problems", "max_operand"):
        value = getattr(arithmetic, key)
        expect(value >= 1, f"data.arithmetic.{key}", value, "a whole number of at least 1")
    different = (arithmetic.max_operand + 1) ** 2
    expect(
        config.path is not None or arithmetic.problems + arithmetic.eval_problems <= different,
        "data.arithmetic.problems",
        arithmetic.problems,
        f"at most {different} problems together with data.arithmetic.eval_problems={arithmetic.eval_problems}, "
        f"all that data.arithmetic.max_operand={arithmetic.max_operand} allows",
    )
    expect(0 < config.eval_fraction < 1, "data.eval_fraction", config.eval_fraction, "a number between 0 and 1")
    for key in ("question", "answer"):
        value = getattr(config, key)
        expect(bool(value), f"data.{key}", repr(value), "the name of a field of the rows")
    expect(config.answer_after != "", "data.answer_after", "''", "null or a text such as '####'")
    expect(
        config.system is None or config.template is Template.chat,
        "data.system",
        config.system,
        "null with data.template=plain, which has no messages",
    )
    for name, evaluation in config.eval_sets.items():
        key = f"data.eval_sets.{name}.rows"
        expect(evaluation.rows is None or evaluation.rows >= 1, key, evaluation.rows, "null or a whole number above 0")
