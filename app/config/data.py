"""Settings of `data=`: the prompts and how a row becomes one."""

from dataclasses import dataclass, field
from enum import Enum

from app.config.setting import setting
from app.errors import expect


class Template(Enum):
    """Rendering of a question as a prompt."""

    plain = "plain"
    chat = "chat"


@dataclass
class ArithmeticConfig:
    """Generated additions such as `12+34=`, used where `data.path` is null."""

    problems: int = setting(2000, "Training rows.", at_least=1)
    eval_problems: int = setting(200, "Held-out rows, disjoint from the training rows.", at_least=1)
    max_operand: int = setting(50, "Largest operand.", at_least=1)


@dataclass
class EvalSetConfig:
    """One evaluation set."""

    path: str | None = setting(
        None, "As data.path; null takes the split of the training set or, of a local file, its held-out rows."
    )
    subset: str | None = setting(None, "As data.subset; null is the training set's if data.path is shared.")
    split: str = setting("test", "Split of a Hugging Face data set.")
    question: str | None = setting(None, "As data.question; null is the training set's.")
    answer: str | None = setting(None, "As data.answer; null is the training set's.")
    answer_after: str | None = setting(
        None, "As data.answer_after; null is the training set's, '' takes the whole answer field."
    )
    rows: int | None = setting(None, "Evaluate on the first rows only; null evaluates on all.", at_least=1)


@dataclass
class DataConfig:
    """Training prompts, their template, and the evaluation sets."""

    name: str = setting("arithmetic", "Name of the data set; the prompt ids begin with it.")
    path: str | None = setting(
        None, "JSONL file, Parquet file or Hugging Face data set id; null generates arithmetic problems."
    )
    subset: str | None = setting(None, "Configuration name of a Hugging Face data set; null is its default.")
    split: str = setting("train", "Split of a Hugging Face data set.")
    question: str = setting(
        "question", "Field with the question; dots reach into nested fields and lists: prompt.0.content."
    )
    answer: str = setting("answer", "Field with the reference answer; dots as in data.question.")
    answer_after: str | None = setting(
        None, "Take the answer after the last occurrence of this text, such as '####'; null takes the whole field."
    )
    distinct: bool = setting(False, "Keep only the first of rows with the same question and answer.")
    template: Template = setting(
        Template.plain, "plain joins prefix, question and suffix; chat applies the tokenizer's chat template as well."
    )
    prefix: str = setting("", "Text before the question.")
    suffix: str = setting("", "Text after the question.")
    system: str | None = setting(None, "System message of the chat template; null sends none.")
    thinking: bool = setting(False, "Enable the chat template's thinking mode.")
    shuffle: bool = setting(True, "Shuffle the training rows in every epoch, seeded by `seed`.")
    eval_fraction: float = setting(
        0.05,
        "Share of the training rows held out, at least 1 row, where evaluation has no split or file of its own.",
        above=0,
        below=1,
    )
    eval_sets: dict[str, EvalSetConfig] = setting(
        {},
        "Evaluation sets by name; {} evaluates on held-out training rows, named eval.",
        noun="entries as in +data.eval_sets={aime: {path: FILE}}",
    )
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)

    def validate(self) -> None:
        """Raise `ConfigError` for settings that contradict each other."""
        expect(self.question != "", "data.question", "''", "the name of a field of the rows")
        expect(self.answer != "", "data.answer", "''", "the name of a field of the rows")
        expect(self.answer_after != "", "data.answer_after", "''", "null or a text such as '####'")

        arithmetic = self.arithmetic
        distinct_problems = (arithmetic.max_operand + 1) ** 2
        expect(
            self.path is not None or arithmetic.problems + arithmetic.eval_problems <= distinct_problems,
            "data.arithmetic.problems",
            arithmetic.problems,
            f"at most {distinct_problems} problems together with "
            f"data.arithmetic.eval_problems={arithmetic.eval_problems}, all that "
            f"data.arithmetic.max_operand={arithmetic.max_operand} allows",
        )

        expect(
            self.system is None or self.template is Template.chat,
            "data.system",
            self.system,
            "null with data.template=plain, which has no messages",
        )
