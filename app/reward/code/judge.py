"""Run a row's tests on a program. Expected values stay in this process, and the program in its sandbox.

Tests run in a fork of this process, as trusted as the rows, on a `Remote` for each object of the program. What they do
with one is an expression that the program's process evaluates. Only values of Python's standard types come back; any
other is a `Remote` again, which is equal to no value, so that no `__eq__` of the program decides what a value is.

Invariants:
- The fork is killed at the deadline, whatever a test does with a value, or catches.
- Once the program has ended, the fork ends: no test passes because it takes that for an exception of the program.
"""

import builtins
import datetime
import importlib
import json
import multiprocessing
import os
import pickle
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from app.reward.code.row_tests import RETURNS, Asserts, Stdin, Tests
from app.reward.code.sandbox import LocalSandbox, Program
from app.worker.process import die_with_parent

ATOMS = (type(None), bool, float, str, bytes)
# Constructors of what `runner.typed` named: of all its parts, or of one after another
OF_PARTS: Mapping[str, Callable[[Any], Any]] = {
    **{each.__name__: each for each in (dict, tuple, set, frozenset, bytes, bytearray, deque)},
    "int": lambda text: int(text, 16),
}
OF_ARGUMENTS: Mapping[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (complex, range, Fraction, Decimal)},
    **{name: getattr(datetime, name) for name in ("date", "datetime", "time", "timedelta", "timezone")},
}


@dataclass(frozen=True, slots=True)
class Judge:
    """Runs tests on programs."""

    sandbox: LocalSandbox
    stop_early: bool  # leave out the tests after the first that fails
    timeout_s: float  # for all tests of a program

    def passed(self, code: str, tests: Tests) -> int:
        """Return how many tests a program passes."""
        deadline = time.monotonic() + self.timeout_s
        if isinstance(tests, Stdin):
            return sum(self._until_failed(self._scripts(code, tests, deadline)))
        with self.sandbox.started(code, self.timeout_s) as program:
            return sum(forked(self._until_failed(statements(program, tests)), deadline))

    def _until_failed(self, verdicts: Iterator[bool]) -> Iterator[bool]:
        for passed in verdicts:
            yield passed
            if not passed and self.stop_early:
                break

    def _scripts(self, code: str, tests: Stdin, deadline: float) -> Iterator[bool]:
        for given, expected in tests.cases:
            if (remaining := deadline - time.monotonic()) <= 0:
                return
            output = self.sandbox.run(code, given, remaining)
            yield output is not None and same_lines(output, expected)


def forked(verdicts: Iterator[bool], deadline: float) -> list[bool]:
    """Return what an iterator yields in a fork of this process until the deadline."""
    with open(os.memfd_create("verdicts"), "r+b", buffering=0) as file:
        parent = os.getpid()

        def write() -> None:
            die_with_parent(parent)
            sys.set_int_max_str_digits(0)
            for passed in verdicts:
                file.write(bytes([passed]))

        child = multiprocessing.get_context("fork").Process(target=write)
        child.start()
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.join()
        child.close()
        file.seek(0)
        return [bool(each) for each in file.read()]


def statements(program: Program, tests: Asserts) -> Iterator[bool]:
    """Yield for each statement whether it used the program and ended without an exception."""
    for statement in tests.cases:
        random.seed(0)  # a test that draws its inputs draws the same for each program
        session = Session(program, tests)
        try:
            exec(compile(tests.setup, "setup", "exec"), session)
            exec(compile(statement, "test", "exec"), session)
        except BaseException:  # also what the program's values make a test raise
            yield False
        else:
            yield session.answered and not session.lacking


class Session(dict[str, Any]):
    """Globals of a test: what it defines, builtins, modules of the standard library, else names of the program.

    Attributes:
        answered: The program has answered.
        lacking: It does not define a name that the test uses.
    """

    def __init__(self, program: Program, tests: Asserts) -> None:
        super().__init__({"__name__": "test", RETURNS: returns})
        self.answered = self.lacking = False
        self._program, self._tests = program, tests
        self._lent: list[Callable[..., Any]] = []
        self._classes: dict[str, type] = {}

    def __missing__(self, name: str) -> Any:
        if name not in self._tests.defined:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in self._tests.modules:
                return importlib.import_module(name)
        try:
            return self.ask(f"g[{name!r}] if {name!r} in g else getattr(g['Solution'](), {name!r})")
        except (KeyError, AttributeError) as error:
            self.lacking = True
            raise KeyError(name) from error

    def _request(self, expression: str) -> tuple[str, Any]:
        """Return the kind and the value of an answer, after the calls of what the test has lent, or raise it."""
        kind, value = self._answer(self._program.ask(expression))
        while kind == "call":
            number, args, kwargs = value
            try:
                reply = f"'value', {self.source(self._lent[number](*args, **kwargs))}"
            except Exception as error:
                reply = f"'raised', {self.source(error)}"
            kind, value = self._answer(self._program.ask(reply))
        self.answered = True
        if kind == "raised":
            raise value
        return kind, value

    def ask(self, expression: str) -> Any:
        """Return the value of an expression, or raise what it raised."""
        return self._request(f"'value', {expression}")[1]

    def call(self, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of the program. Where it returns nothing, its changes of the arguments are made here too."""
        kind, value = self._request(f"do({function}, {self.source(list(args))}, {self.source(dict(kwargs))})")
        if kind == "value":
            return value
        for given, changed in zip([*args, *kwargs.values()], value, strict=True):
            if isinstance(given, list | bytearray):
                given[:] = changed
            elif isinstance(given, dict | set):
                given.clear()
                given.update(changed)
        return None

    def source(self, value: Any) -> str:
        """Return an expression of a value, for the program's process."""
        if isinstance(value, Remote):
            return value._expression
        if type(value) is int:
            return hex(value)  # in decimal, the time grows with the square of the length
        if type(value) in ATOMS:
            return repr(value)
        if type(value) in (list, tuple, set, frozenset):
            return f"{type(value).__name__}([{', '.join(map(self.source, value))}])"
        if type(value) is dict:
            return f"dict({self.source(list(value.items()))})"
        try:
            return f"loads({pickle.dumps(value)!r})"
        except (pickle.PicklingError, AttributeError, TypeError):
            if not callable(value):
                raise
        self._lent.append(value)
        return f"lent({len(self._lent) - 1})"

    def _answer(self, line: bytes) -> tuple[str, Any]:
        """Return the kind and the value of a line. Without a valid one the program has ended, and so does this."""
        try:
            kind, value = json.loads(line)
            value = self._decoded(value)
            if kind == "raised":
                (error, *bases), args = value
                value = self._class(error, *bases).__new__(self._class(error, *bases), *args)
                assert isinstance(value, BaseException)
        except Exception:
            os._exit(0)
        return kind, value

    def _decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decoded(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((name, parts),) = value.items()
        parts = self._decoded(parts)
        if name == "object":
            return Remote(self, f"r[{parts:d}]")
        if name == "class":
            return self._class(*parts)
        return OF_PARTS[name](parts) if name in OF_PARTS else OF_ARGUMENTS[name](*parts)

    def _class(self, name: str, *bases: str) -> type:
        """Return the builtin class of this name; else a class of that name, derived from the others."""
        known = getattr(builtins, name, None) or self._classes.get(name)
        if not isinstance(known, type):
            known = self._classes[name] = type(name, (self._class(*bases),), {})
        return known


class Remote:
    """A function, class or object of the program. Only another one can be equal to it, or be compared with it."""

    __slots__ = ("_expression", "_session")

    def __init__(self, session: Session, expression: str) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_expression", expression)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._session.call(self._expression, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._session.ask(f"{self._expression}.{name}")

    def __enter__(self) -> Any:
        return self._session.ask(f"{self._expression}.__enter__()")

    def __exit__(self, *error: object) -> Any:
        return self._session.ask(f"{self._expression}.__exit__(None, None, None)")

    def __instancecheck__(self, value: Any) -> Any:
        return self._session.ask(f"isinstance({self._session.source(value)}, {self._expression})")


def _forwarded(function: str, compares: bool = False, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Remote, *operands: Any) -> Any:
        if compares and not isinstance(operands[0], Remote):
            return NotImplemented
        given = [self._session.source(each) for each in (self, *operands)]
        return self._session.ask(f"{function}({', '.join(reversed(given) if reflected else given)})")

    return method


# What Python does with an object, by builtins and by the module `operator`
for _name in ("len", "bool", "str", "repr", "int", "float", "iter", "next", "setattr"):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in ("neg", "pos", "invert", "abs", "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _forwarded(f"operator.{_name}"))
for _name in "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split():  # noqa: SIM905
    setattr(Remote, f"__{_name.strip('_')}__", _forwarded(f"operator.{_name}"))
    setattr(Remote, f"__r{_name.strip('_')}__", _forwarded(f"operator.{_name}", reflected=True))
for _name in ("eq", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _forwarded(f"operator.{_name}", compares=True))


def returns(function: Callable[..., Any], text: str) -> None:
    """Assert what a function returns: JSON, which has no tuples. APPS has some results in a list of one."""
    args, expected = json.loads(text)
    found = _lists(function(*args))
    assert found == expected or (isinstance(expected, list) and [found] == expected)


def _lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_lists(each) for each in value]
    return {str(key): _lists(each) for key, each in value.items()} if isinstance(value, dict) else value


def same_lines(found: str, expected: str) -> bool:
    """Compare outputs line by line, without the space around lines and after the last; numbers by value."""
    lines = [[line.strip() for line in text.strip().split("\n")] for text in (found, expected)]
    return len(lines[0]) == len(lines[1]) and all(map(_same_line, *lines))


def _same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    words = [found.split(), expected.split()]
    try:
        return len(words[0]) == len(words[1]) and list(map(Decimal, words[0])) == list(map(Decimal, words[1]))
    except InvalidOperation:
        return False
