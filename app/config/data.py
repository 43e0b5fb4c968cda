"""Settings of `data=`: the prompts and how a row becomes one."""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from app.config.setting import check_target, setting
from app.errors import expect

FILES = "a file, a pattern such as 'rows/*.jsonl', a list of both, or the id of a Hugging Face data set"
TEMPLATE_KWARGS = "chat_template_kwargs"  # a setting, and a column of rows, as in TRL
RESERVED = frozenset(("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template"))
SET_NAME = re.compile(r"[\w.-]+")  # a part of prompt ids and of metric names
OPERANDS = {"arithmetic": range(51), "products": range(10, 100)}  # of generated problems, by data.name
ENVIRONMENT = "environment"  # as data.name: the rows are the environment's tasks


class Template(Enum):
    """Rendering of a question as a prompt."""

    plain = "plain"
    chat = "chat"


@dataclass
class GeneratedConfig:
    """Sizes of generated data, used where `data.path` is null."""

    problems: int = setting(2000, "Training rows.", at_least=1)
    eval_problems: int = setting(200, "Held-out rows, disjoint from the training rows.", at_least=1)


@dataclass
class TrainSetConfig:
    """One of several training sets."""

    path: Any = setting(None, "As data.path.", noun=FILES)
    question: str | None = setting(None, "As data.question, which null takes.")
    answer: str | None = setting(None, "As data.answer, which null takes.")
    weight: float = setting(
        1.0,
        "Prompts drawn from this set, relative to the weights of the others; a set that ends begins again.",
        above=0,
    )


@dataclass
class EvalSetConfig:
    """One evaluation set."""

    path: Any = setting(
        None,
        "As data.path; null takes the split of the training set or, of local files, their held-out rows.",
        noun=f"null, {FILES}",
    )
    split: str = setting("test", "Split of a Hugging Face data set.")
    question: str | None = setting(None, "As data.question, which null takes.")
    answer: str | None = setting(None, "As data.answer, which null takes.")
    rows: int | None = setting(None, "Evaluate on the first rows only; null evaluates on all.", at_least=1)


@dataclass
class DataConfig:
    """Training prompts, their template, and the evaluation sets."""

    name: str = setting(
        "arithmetic",
        "Name of the data set; the prompt ids begin with it. Without rows of your own it says which they are: "
        "generated sums (arithmetic: 12+34=) or products (products: 37*84=), or the tasks of the environment.",
    )
    path: Any = setting(
        None,
        "Training rows as JSON lines, JSON list, CSV (each also .gz) or Parquet; null: see data.name.",
        noun=f"null, {FILES}",
    )
    subset: str | None = setting(None, "Configuration name of a Hugging Face data set; null is its default.")
    split: str = setting("train", "Split of a Hugging Face data set to train on.")
    _target_: str | None = setting(
        None,
        "Dotted path of your own function that returns or yields the training rows; it replaces data.path.",
        noun="a path such as my_package.my_module.my_rows",
    )
    args: dict[str, Any] = setting({}, "Keyword arguments of data._target_.", noun="entries as in +data.args.limit=100")
    train_sets: dict[str, TrainSetConfig] = setting(
        {},
        "Training sets by name, mixed by weight, in place of data.path.",
        noun="entries as in +data.train_sets.mine.path=FILE",
    )
    question: str = setting(
        "question",
        "Field with the question, which is text or a list of chat messages; dots reach into nested fields and lists: "
        "extra.0.text.",
    )
    answer: str | None = setting(
        "answer",
        "Field with the reference answer, dots as in data.question; null where rows have none, and the rewards are "
        "your own or the environment's.",
    )
    answer_after: str | None = setting(
        None, "Take the answer after the last occurrence of this text, such as '####'; null takes the whole field."
    )
    context: str | None = setting(
        None,
        "Field that follows the question after an empty line, the items of a list one a line, such as the tests that a "
        "program shall pass; null adds nothing, and nothing is added to chat messages.",
    )
    tools: str | None = setting(
        None, "Field with the tools that the chat template shows, a list of JSON schemas or its text; null shows none."
    )
    distinct: bool = setting(False, "Keep only the first of rows with the same question and answer.")
    max_broken_rows: int = setting(
        0,
        "Rows that may be skipped, over all sets, because they cannot be parsed or lack a question or an answer; the "
        "next one is an error.",
        at_least=0,
    )
    template: Template = setting(
        Template.plain, "plain joins prefix, question and suffix; chat applies the tokenizer's chat template as well."
    )
    prefix: str = setting("", "Text before the question.")
    suffix: str = setting("", "Text after the question.")
    system: str | None = setting(None, "System message of the chat template; null sends none.")
    thinking: bool = setting(False, "Enable the chat template's thinking mode.")
    chat_template_kwargs: dict[str, Any] = setting(
        {},
        "Further variables of the chat template; those in a row's column chat_template_kwargs come before them.",
        noun="entries as in +data.chat_template_kwargs.reasoning_effort=low",
    )
    last_reply_only: bool = setting(False, "Imitate only the last reply of a demonstration, not those before it.")
    shuffle: bool = setting(True, "Shuffle the training rows in every epoch, seeded by `seed`.")
    eval_path: Any = setting(
        None,
        "Rows to evaluate on, in place of data.eval_sets and of held-out rows; null leaves it to them.",
        noun=f"null, {FILES}",
    )
    eval_fraction: float = setting(
        0.05,
        "Share of the training rows held out, at least 1 row, where evaluation has no split or file of its own.",
        above=0,
        below=1,
    )
    eval_sets: dict[str, EvalSetConfig] = setting(
        {},
        "Evaluation sets by name; {} evaluates on held-out training rows, named eval, also where a preset has sets.",
        noun="entries as in +data.eval_sets.mine.path=FILE",
    )
    demonstrations: Any = setting(
        None,
        "Rows whose replies an RL run imitates as well, algorithm.demonstrations_per_step of them in each step; "
        "question and reply are read as in mode=sft.",
        noun=f"null, {FILES}",
    )
    arithmetic: GeneratedConfig = field(default_factory=GeneratedConfig)
    products: GeneratedConfig = field(default_factory=GeneratedConfig)

    @property
    def generated(self) -> GeneratedConfig:
        return self.products if self.name == "products" else self.arithmetic

    @property
    def from_environment(self) -> bool:
        """Whether the rows are the tasks that the environment lists when it is loaded."""
        return self.name == ENVIRONMENT and not self._has_own_rows

    @property
    def _has_own_rows(self) -> bool:
        return self.path is not None or self._target_ is not None or bool(self.train_sets)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each training set by its name; empty if there is one without a name."""
        return {name: each.weight for name, each in self.train_sets.items()}

    def validate(self) -> None:
        expect(self.question != "", "data.question", "''", "the name of a field of the rows")
        for name in ("answer", "tools", "context"):
            expect(getattr(self, name) != "", f"data.{name}", "''", "null or the name of a field of the rows")
        expect(self.answer_after != "", "data.answer_after", "''", "null or a text such as '####'")
        whole = self.answer is not None or self.answer_after is None
        expect(whole, "data.answer_after", self.answer_after, "null with data.answer=null")

        self._validate_sources()
        if not self._has_own_rows and self.name != ENVIRONMENT:
            accepted = f"{FILES}; or data.name={' or '.join(OPERANDS)}, whose problems are generated"
            expect(self.name in OPERANDS, "data.path", None, accepted)
            sizes, most = self.generated, len(OPERANDS[self.name]) ** 2
            accepted = f"at most {most} problems together with data.{self.name}.eval_problems={sizes.eval_problems}"
            expect(sizes.problems + sizes.eval_problems <= most, f"data.{self.name}.problems", sizes.problems, accepted)

        accepted = "null with data.template=plain, which has no messages"
        for name, value in (("system", self.system), ("tools", self.tools)):
            expect(value is None or self.template is Template.chat, f"data.{name}", value, accepted)
        own, given = self.chat_template_kwargs, RESERVED | {"enable_thinking"}
        expect(not own or self.template is Template.chat, f"data.{TEMPLATE_KWARGS}", own, "{} with data.template=plain")
        accepted = f"variables without {', '.join(sorted(given))}; data.thinking sets the last"
        expect(given.isdisjoint(own), f"data.{TEMPLATE_KWARGS}", own, accepted)

    def _validate_sources(self) -> None:
        paths = {f"data.{name}": getattr(self, name) for name in ("path", "eval_path", "demonstrations")}
        for section in ("train_sets", "eval_sets"):
            for name, each in getattr(self, section).items():
                accepted = "names of letters, digits, _, - and ."
                expect(SET_NAME.fullmatch(str(name)) is not None, f"data.{section}", name, accepted)
                paths[f"data.{section}.{name}.path"] = each.path
        for key, path in paths.items():
            parts = path if isinstance(path, list) else [path]
            good = bool(parts) and all(isinstance(part, str) and part for part in parts)
            expect(good or (path is None and "train_sets" not in key), key, path, FILES)

        check_target("data", self._target_, self.args)
        alone = self._target_ is None or not self.train_sets
        expect(alone, "data._target_", self._target_, "null with data.train_sets")
