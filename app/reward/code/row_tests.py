"""Reads the tests of a row. Its columns determine the form, see the table in docs/rewards.md."""

import ast
import base64
import builtins
import io
import json
import pickle
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ACCEPTED = (
    "rows with test_list (MBPP), test and entry_point (HumanEval), input_output (APPS), public_test_cases "
    "(LiveCodeBench), or inputs and outputs"
)

RETURNS = "__returns__"  # in a test, the function `judge.returns`


class NoTests(Exception):
    """A row has no tests that can be read."""


@dataclass(frozen=True, slots=True)
class Asserts:
    """Statements, each of which passes unless it raises."""

    setup: str  # code before each of them
    cases: Sequence[str]
    defined: frozenset[str] = frozenset()  # by the reference solution, and the entry point: they shadow builtins
    modules: frozenset[str] = frozenset()  # of the standard library, which tests may use without an import
    names: frozenset[str] = frozenset()  # that the program may have to define
    form: str = "asserts"  # in messages


@dataclass(frozen=True, slots=True)
class Stdin:
    """Pairs of a program's stdin and its expected stdout."""

    cases: Sequence[tuple[str, str]]
    names = frozenset[str]()
    form = "stdin and stdout"


Tests = Asserts | Stdin


def read_tests(row: Mapping[str, Any], answer: str = "") -> Tests:
    """Return the tests of a row. Raises `NoTests` if there are none, or they cannot be read."""
    try:
        tests = _read(row, answer)
    except (ValueError, LookupError, TypeError, SyntaxError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise NoTests(f"its tests cannot be read: {type(error).__name__}: {error}") from error
    if tests is None:
        raise NoTests(f"it has the columns {', '.join(sorted(row)) or 'none'}")
    if not tests.cases:
        raise NoTests("its list of tests is empty")
    return tests


def _read(row: Mapping[str, Any], answer: str) -> Tests | None:
    if row.get("test_list") is not None:
        setup = [row.get("test_setup_code") or "", *(_json(row.get("test_imports")) or [])]
        return _asserts("\n".join(setup), [str(each) for each in _json(row["test_list"])], answer)
    if row.get("test") is not None and row.get("entry_point"):
        return _asserts("", [f"{row['test']}\ncheck({row['entry_point']})"], answer, str(row["entry_point"]))
    if row.get("input_output") is not None:
        return _pairs(_json(row["input_output"]))
    if row.get("public_test_cases") is not None:
        return _live_code_bench(row)
    if row.get("inputs") is not None and row.get("outputs") is not None:
        return _pairs(row)

    content = _json(answer) if answer.lstrip().startswith("{") else None
    return _pairs(content) if isinstance(content, dict) and {"inputs", "outputs"} <= content.keys() else None


def _asserts(setup: str, statements: Sequence[str], answer: str, entry_point: str = "") -> Asserts:
    nodes = [node for each in (setup, *statements) for node in ast.walk(ast.parse(each))]
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    defined = set(re.findall(r"^\w+", entry_point))
    with suppress(SyntaxError, ValueError):  # an answer that is no code
        statements_of_answer = ast.parse(answer.strip()).body
        defined |= {each.name for each in statements_of_answer if isinstance(each, ast.FunctionDef | ast.ClassDef)}

    modules = owners & sys.stdlib_module_names - defined
    own = {getattr(node, "name", getattr(node, "arg", None)) for node in nodes}  # functions, classes, parameters
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - {*dir(builtins), *modules, *own}
    return Asserts(setup, statements, frozenset(defined), frozenset(modules), frozenset(used | defined))


def _pairs(value: Mapping[str, Any]) -> Tests:
    inputs, outputs = _json(value["inputs"]), _json(value["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs, {len(outputs)} outputs")
    if value.get("fn_name"):
        return _calls(value["fn_name"], list(zip(inputs, outputs, strict=True)))
    return Stdin([(_lines(each), _lines(expected)) for each, expected in zip(inputs, outputs, strict=True)])


def _calls(function: Any, cases: Sequence[tuple[Any, Any]]) -> Asserts:
    """Write calls as statements of `judge.returns`. Arguments come as a list, or as text with one JSON value a line."""
    name = str(function).rpartition(".")[2]
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a function")
    statements = []
    for given, expected in cases:
        if isinstance(given, str):
            given, expected = [json.loads(line) for line in given.split("\n") if line.strip()], json.loads(expected)
        if not isinstance(given, list):
            raise ValueError(f"the arguments {given!r} are no list")
        statements.append(f"{RETURNS}({name}, {json.dumps((given, expected))!r})")
    defined = frozenset([name])
    return Asserts("", statements, defined, names=defined | {"Solution"}, form="function calls")


def _live_code_bench(row: Mapping[str, Any]) -> Tests:
    private: Any = row.get("private_test_cases") or []
    try:
        private = _json(private)
    except ValueError:  # as published: compressed pickles of JSON text
        packed = base64.b64decode(private, validate=True)
        private = json.loads(_Text(io.BytesIO(zlib.decompress(packed))).load())

    cases = [*_json(row["public_test_cases"]), *private]
    pairs = [(each["input"], each["output"]) for each in cases]
    if any(each.get("testtype") == "functional" for each in cases):
        return _calls((_json(row.get("metadata")) or {})["func_name"], pairs)
    return Stdin([(str(given), str(expected)) for given, expected in pairs])


class _Text(pickle.Unpickler):
    """Unpickles text and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in private_test_cases")


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
