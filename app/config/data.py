"""Settings of `data=`: the prompts and how a row becomes one."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from app.config.setting import setting
from app.errors import expect

FILES = "a file, a pattern such as 'rows/*.jsonl', a list of both, or the id of a Hugging Face data set"
TEMPLATE_KWARGS = "chat_template_kwargs"  # a setting, and a column of rows, as in TRL
RESERVED = frozenset(("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template"))
SET_NAME = re.compile(r"[\w.-]+")  # a part of prompt ids and of metric names
FACTORS = range(10, 100)  # of generated products
DIGITS = range(2, 10)  # second factors of generated chains


class Template(Enum):
    """Rendering of a question as a prompt."""

    plain = "plain"
    chat = "chat"


class Generator(Enum):
    """Problems that are generated."""

    arithmetic = "arithmetic"
    products = "products"
    chain = "chain"


@dataclass
class GeneratorConfig:
    """Sizes of generated data."""

    problems: int = setting(2000, "Training rows.", at_least=1)
    eval_problems: int = setting(200, "Held-out rows, disjoint from the training rows.", at_least=1)

    @property
    def distinct(self) -> int:
        """How many different problems there are."""
        raise NotImplementedError

    def validate(self, key: str) -> None:
        """Raise `ConfigError` for more rows than there are different problems. `key` is that of the section."""
        accepted = f"at most {self.distinct} problems together with {key}.eval_problems={self.eval_problems}"
        expect(self.problems + self.eval_problems <= self.distinct, f"{key}.problems", self.problems, accepted)


@dataclass
class ArithmeticConfig(GeneratorConfig):
    """Generated additions such as `12+34=`, used where `data.path` is null."""

    max_operand: int = setting(50, "Largest operand.", at_least=1)

    @property
    def distinct(self) -> int:
        return (self.max_operand + 1) ** 2


@dataclass
class ProductsConfig(GeneratorConfig):
    """Generated products such as `37*84=`."""

    distinct = len(FACTORS) ** 2


@dataclass
class ChainConfig(GeneratorConfig):
    """Generated chains of a product and a sum such as `12*7+30=`."""

    distinct = len(FACTORS) ** 2 * len(DIGITS)


@dataclass
class TrainSetConfig:
    """One of several training sets."""

    path: Any = setting(None, "As data.path.", noun=FILES)
    weight: float = setting(
        1.0,
        "Prompts drawn from this set, relative to the weights of the others; a set that ends begins again.",
        above=0,
    )
    subset: str | None = setting(None, "As data.subset.")
    split: str = setting("train", "Split of a Hugging Face data set.")
    question: str | None = setting(None, "As data.question, which null takes.")
    answer: str | None = setting(None, "As data.answer, which null takes.")
    answer_after: str | None = setting(None, "As data.answer_after, which null takes; '' takes the whole answer field.")


@dataclass
class EvalSetConfig:
    """One evaluation set."""

    path: Any = setting(
        None,
        "As data.path; null takes the split of the training set or, of local files, their held-out rows.",
        noun=f"null, {FILES}",
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
    path: Any = setting(
        None,
        "Training rows as JSON lines, JSON list, CSV (each also .gz) or Parquet; null generates problems.",
        noun=f"null, {FILES}",
    )
    subset: str | None = setting(None, "Configuration name of a Hugging Face data set; null is its default.")
    split: str = setting("train", "Split of a Hugging Face data set.")
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
        None,
        "Field with the tools that the chat template shows, a list of JSON schemas or its text; null shows none.",
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
    from_environment: bool = setting(
        False, "The rows are the tasks of the environment, which lists them when it is loaded."
    )
    generator: Generator = setting(
        Generator.arithmetic,
        "Problems that are generated where data.path is null: sums (12+34=), products (37*84=), or chains of both "
        "(12*7+30=).",
    )
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    products: ProductsConfig = field(default_factory=ProductsConfig)
    chain: ChainConfig = field(default_factory=ChainConfig)

    @property
    def sources(self) -> list[str]:
        """Names of the training sets, each the `source` of its prompts."""
        return list(self.train_sets) or [self.name]

    def validate(self) -> None:
        """Raise `ConfigError` for settings that contradict each other."""
        expect(self.question != "", "data.question", "''", "the name of a field of the rows")
        expect(self.answer != "", "data.answer", "''", "the name of a field of the rows")
        expect(self.tools != "", "data.tools", "''", "null or the name of a field of the rows")
        expect(self.context != "", "data.context", "''", "null or the name of a field of the rows")
        expect(self.answer_after != "", "data.answer_after", "''", "null or a text such as '####'")
        marked = self.answer is None and self.answer_after is not None
        expect(not marked, "data.answer_after", self.answer_after, "null with data.answer=null")

        self._validate_sources()
        own_rows = self.path is not None or self._target_ is not None or bool(self.train_sets)
        accepted = "false with data.path, data._target_ or data.train_sets"
        expect(not (self.from_environment and own_rows), "data.from_environment", self.from_environment, accepted)
        if self.path is None:
            self.arithmetic.validate("data.arithmetic")
            self.products.validate("data.products")
            self.chain.validate("data.chain")

        accepted = "null with data.template=plain, which has no messages"
        for name, value in (("system", self.system), ("tools", self.tools)):
            expect(value is None or self.template is Template.chat, f"data.{name}", value, accepted)
        own = self.chat_template_kwargs
        expect(not own or self.template is Template.chat, f"data.{TEMPLATE_KWARGS}", own, "{} with data.template=plain")
        given = RESERVED | {"enable_thinking"}
        accepted = f"variables without {', '.join(sorted(given))}; data.thinking sets the last"
        expect(given.isdisjoint(own), f"data.{TEMPLATE_KWARGS}", own, accepted)

    def _validate_sources(self) -> None:
        _expect_path("data.path", self.path)
        _expect_path("data.eval_path", self.eval_path)
        _expect_path("data.demonstrations", self.demonstrations)

        for name, training in self.train_sets.items():
            expect(training.path is not None, f"data.train_sets.{name}.path", None, FILES)
            _expect_path(f"data.train_sets.{name}.path", training.path)
        for name, evaluation in self.eval_sets.items():
            _expect_path(f"data.eval_sets.{name}.path", evaluation.path)
        _expect_names("data.train_sets", self.train_sets)
        _expect_names("data.eval_sets", self.eval_sets)

        target = self._target_
        accepted = "the dotted path of a function, such as my_package.my_module.my_rows"
        expect(target is None or ("." in target.strip(".") and ".." not in target), "data._target_", target, accepted)
        expect(target is None or not self.train_sets, "data._target_", target, "null with data.train_sets")
        expect(target is not None or not self.args, "data.args", self.args, "{} without data._target_")


def _expect_path(key: str, path: object) -> None:
    parts = path if isinstance(path, list) else [path]
    good = path is None or (bool(parts) and all(isinstance(part, str) and part for part in parts))
    expect(good, key, path, FILES)


def _expect_names(key: str, names: Iterable[str]) -> None:
    for name in names:
        expect(SET_NAME.fullmatch(str(name)) is not None, key, name, "names of letters, digits, _, - and .")
