"""Runs a row's tests on a program. Expected values stay in this process, the program in its sandbox.

Tests are as trusted as the rows and run in a fork of this process. They see each object of the program as a `Remote`;
operations on it become expressions that the program's process evaluates. Only values of Python's standard types come
back. Anything else is another `Remote`, which equals no value, so the program's `__eq__` decides nothing. Nor does its
arithmetic with a test's values, whose result has to be another object.

Invariants:
- The fork is killed at the deadline, whatever a test does or catches.
- When the program ends, so does the fork: no test can pass by taking that for an exception of the program.
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
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import takewhile
from typing import Any

from app.reward.code.row_tests import RETURNS, Asserts, Stdin, Tests
from app.reward.code.sandbox import Ask, LocalSandbox
from app.worker.process import die_with_parent

ATOMS = (type(None), bool, float, str, bytes)
# Constructors by the names of `runner.typed`: of a list of parts, or of arguments
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
        deadline = time.monotonic() + self.timeout_s
        until_failed: Any = partial(takewhile, bool) if self.stop_early else iter
        if isinstance(tests, Stdin):
            return sum(until_failed(self._scripts(code, tests, deadline)))
        with self.sandbox.started(code, self.timeout_s) as ask:
            return sum(forked(until_failed(statements(ask, tests)), deadline))

    def _scripts(self, code: str, tests: Stdin, deadline: float) -> Iterator[bool]:
        for given, expected in tests.cases:
            if (remaining := deadline - time.monotonic()) > 0:
                output = self.sandbox.run(code, given, remaining)
                yield output is not None and same_lines(output, expected)


def forked(verdicts: Iterator[bool], deadline: float) -> list[bool]:
    """Run an iterator in a fork of this process until the deadline; return what it yielded."""
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


def statements(ask: Ask, tests: Asserts) -> Iterator[bool]:
    """Run each statement; yield whether it used the program and raised nothing."""
    for statement in tests.cases:
        random.seed(0)  # a test that draws its inputs draws the same for each program
        session = Session(ask, tests)
        try:
            for source in (tests.setup, statement):
                exec(compile(source, "test", "exec"), session)
        except BaseException:  # values of the program can make a test raise anything
            session.lacking = True
        yield session.answered and not session.lacking


class Session(dict[str, Any]):
    """Globals of a test: its own names, builtins, standard-library modules it uses, then the program's names."""

    def __init__(self, ask: Ask, tests: Asserts) -> None:
        super().__init__({"__name__": "test", RETURNS: returns})
        self.answered = False  # whether the program has answered
        self.lacking = False  # whether it lacks a name that the test uses, or the test raised
        self._ask, self._tests = ask, tests
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
        """Send an expression and serve the program's calls of lent functions; return its answer, or raise its error."""
        kind, value = self._answer(self._ask(expression))
        while kind == "call":
            number, args, kwargs = value
            try:
                reply = f"'value', {self.source(self._lent[number](*args, **kwargs))}"
            except Exception as error:
                reply = f"'raised', {self.source(error)}"
            kind, value = self._answer(self._ask(reply))
        self.answered = True
        if kind == "raised":
            raise value
        return kind, value

    def ask(self, expression: str) -> Any:
        return self._request(f"'value', {expression}")[1]

    def call(self, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of the program. If it returns nothing, copy what it changed in its arguments."""
        try:
            kind, value = self._request(f"do({function}, {self.source(list(args))}, {self.source(dict(kwargs))})")
        except StopIteration as error:  # would end a test's `map` before anything was compared
            raise RuntimeError("the program raised StopIteration") from error
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
        """Write a value as an expression for the program's process."""
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
            return f"__import__('pickle').loads({pickle.dumps(value)!r})"
        except (pickle.PicklingError, AttributeError, TypeError):
            if not callable(value):
                raise
        self._lent.append(value)
        return f"lent({len(self._lent) - 1})"

    def _answer(self, line: bytes) -> tuple[str, Any]:
        """Parse an answer. An invalid line means that the program has ended, which ends this process too."""
        try:
            kind, value = json.loads(line)
            value = self._decoded(value)
            if kind == "raised":
                names, args = value
                value = self._class(*names).__new__(self._class(*names), *args)
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
        """Return the builtin class of this name, else one made here as a subclass of the others."""
        known = getattr(builtins, name, None) or self._classes.get(name)
        if not isinstance(known, type):
            known = self._classes[name] = type(name, (self._class(*bases),), {})
        return known


class Remote:
    """A function, class or object of the program. It compares with other remotes only."""

    __slots__ = ("_computed", "_expression", "_session")

    def __init__(self, session: Session, expression: str) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_expression", expression)
        object.__setattr__(self, "_computed", False)  # by the program, from a value of the test

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


ITEM_ACCESS = ("setattr", "operator.getitem", "operator.setitem", "operator.delitem")  # the test compares their result


def _forwarded(
    function: str, compares: bool = False, computes: bool = False, reflected: bool = False
) -> Callable[..., Any]:
    def method(self: Remote, *operands: Any) -> Any:
        remotes = [self, *(each for each in operands if isinstance(each, Remote))]
        with_test_value = len(remotes) <= len(operands)
        if compares and with_test_value:
            return NotImplemented
        given = [self._session.source(each) for each in (self, *operands)]
        result = self._session.ask(f"{function}({', '.join(reversed(given) if reflected else given)})")
        # In `abs(f(x) - 2.5) < 1e-6` the operand is the expected value, and the program could answer with 0.
        if (computes and with_test_value) or (function not in ITEM_ACCESS and any(each._computed for each in remotes)):
            if not isinstance(result, Remote):
                raise TypeError(f"{function}: a value that the program computed from one of the test's decides nothing")
            object.__setattr__(result, "_computed", True)
        return result

    return method


# Python's operations on an object: builtins, and functions of `operator`
for _name in ("len", "bool", "str", "repr", "int", "float", "iter", "next", "setattr"):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in ("neg", "pos", "invert", "abs", "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _forwarded(f"operator.{_name}"))
for _name in "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split():  # noqa: SIM905
    setattr(Remote, f"__{_name.strip('_')}__", _forwarded(f"operator.{_name}", computes=True))
    setattr(Remote, f"__r{_name.strip('_')}__", _forwarded(f"operator.{_name}", computes=True, reflected=True))
for _name in ("eq", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _forwarded(f"operator.{_name}", compares=True))


def returns(function: Callable[..., Any], text: str) -> None:
    """Assert a function's result: JSON, which has no tuples. APPS wraps some results in a list of one."""
    args, expected = json.loads(text)
    found = _lists(function(*args))
    assert found == expected or (isinstance(expected, list) and [found] == expected)


def _lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_lists(each) for each in value]
    return {str(key): _lists(each) for key, each in value.items()} if isinstance(value, dict) else value


def same_lines(found: str, expected: str) -> bool:
    """Compare outputs line by line, ignoring outer whitespace; numbers by value, fractions within 1e-6."""
    lines = [[line.strip() for line in text.strip().split("\n")] for text in (found, expected)]
    if len(lines[0]) != len(lines[1]):
        return False
    try:
        pairs = [each for each in zip(*lines, strict=True) if each[0] != each[1]]
        return all(_same_numbers(*([*map(Decimal, line.split())] for line in pair)) for pair in pairs)
    except ArithmeticError:  # no number, or one beyond Decimal's range
        return False


def _same_numbers(found: Sequence[Decimal], expected: Sequence[Decimal]) -> bool:
    return len(found) == len(expected) and all(
        one == other or (other % 1 != 0 and abs(one - other) <= Decimal("1e-6") * max(Decimal(1), abs(other)))
        for one, other in zip(found, expected, strict=True)
    )
