"""Whether a program passes a row's tests. What is expected stays in this process, and the program in its sandbox.

Tests run here, as trusted as the rows, on a `Remote` for each name that only the program defines. A call of one is an
operation of the program: the test stops there, the program runs with the operations of all tests, and the test starts
again with their values. Only values of Python's plain types come back; any other is a `Remote`, which is equal to
nothing else, so that no `__eq__` of the program decides.
"""

import builtins
import contextlib
import importlib
import json
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from app.reward.code.row_tests import Asserts, Calls, Stdin, Tests
from app.reward.code.sandbox import Sandbox

SCALARS = (type(None), bool, int, float, str)


class _Pending(BaseException):
    """A test needs an operation that has not run. Not an Exception, which a test may catch."""


class _Late(BaseException):
    """The deadline passed while a test ran here."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Runs tests on programs.

    Args:
        stop_early: Leave out the tests after the first that fails.
        timeout_s: For all tests of a program.
    """

    sandbox: Sandbox
    stop_early: bool
    timeout_s: float

    def passed(self, code: str, tests: Tests) -> int:
        """Return how many tests a program passes. Raises `SandboxError`."""
        deadline = time.monotonic() + self.timeout_s
        match tests:
            case Stdin():
                verdicts = self._stdin(code, tests, deadline)
            case Calls():
                verdicts = self._calls(code, tests, deadline)
            case Asserts():
                verdicts = self._asserts(code, tests, deadline)

        count = 0
        for passed in verdicts:
            if not passed and self.stop_early:
                break
            count += passed
        return count

    def _stdin(self, code: str, tests: Stdin, deadline: float) -> Iterator[bool]:
        for given, expected in tests.cases:
            if (remaining := deadline - time.monotonic()) <= 0:
                return
            output = self.sandbox.run({"code": code, "operations": None}, given, remaining)
            yield output.ok and same_lines(output.text.decode(errors="replace"), expected)

    def _calls(self, code: str, tests: Calls, deadline: float) -> Iterator[bool]:
        name = repr(tests.function)
        function = f"(g[{name}] if {name} in g else getattr(g['Solution'](), {name}))"
        operations = [
            (index, 0, f"{function}({', '.join(map(repr, given))})") for index, (given, _) in enumerate(tests.cases)
        ]
        values = self._operate(code, operations, deadline)
        for index, (_, expected) in enumerate(tests.cases):
            passed = False
            with limited(deadline):
                passed = (index, 0) in values and same_value(_decoded(values[index, 0]), expected)
            yield passed

    def _asserts(self, code: str, tests: Asserts, deadline: float) -> Iterator[bool]:
        attempts = [Attempt(index, tests, each) for index, each in enumerate(tests.cases)]
        while True:
            for each in attempts:
                if each.passed is None:
                    each.play(deadline)

            failed = any(each.passed is False for each in attempts)
            waiting = [each for each in attempts if each.passed is None]
            if not waiting or (failed and self.stop_early) or time.monotonic() > deadline:
                break
            operations = [(each.index, *one) for each in waiting for one in enumerate(each.operations)]
            values = self._operate(code, operations, deadline)
            for each in waiting:
                each.take(values)
        yield from (bool(each.passed) for each in attempts)

    def _operate(
        self, code: str, operations: Sequence[tuple[int, int, str]], deadline: float
    ) -> dict[tuple[int, int], Any]:
        """Run a program and then operations; return the JSON value of each that ended."""
        remaining = max(0.1, deadline - time.monotonic())
        output = self.sandbox.run({"code": code, "operations": list(operations)}, "", remaining)
        values: dict[tuple[int, int], Any] = {}
        for line in output.text.split(b"\n"):
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # anything may be there
                test, number, value = json.loads(line)
                values.setdefault((test, number), value)
        return values


@dataclass(slots=True)
class Attempt:
    """A test that is played again until it has all its values, or fails."""

    index: int
    tests: Asserts
    statement: str
    operations: list[str] = field(default_factory=list)
    passed: bool | None = None
    _values: dict[int, Any] = field(default_factory=dict)
    _next: int = 0

    def play(self, deadline: float) -> None:
        """Run the test as far as its values reach."""
        self._next = 0
        self.passed = False
        with limited(deadline):
            random.seed(0)  # a test that draws its inputs asks for the same values again
            try:
                names = Names(self)
                exec(compile(self.tests.setup, "setup", "exec"), names)
                exec(compile(self.statement, "test", "exec"), names)
                self.passed = True
            except _Pending:
                self.passed = None
            except (Exception, SystemExit):  # also what the program's values make a test raise
                pass

    def ask(self, expression: str) -> Any:
        """Return the value of an operation; raise what it raised, or `_Pending` until it has run."""
        number = self._next
        self._next += 1
        if number in self._values and self.operations[number] == expression:
            return self._value(number)
        self.operations[number:] = [expression]
        raise _Pending

    def take(self, values: dict[tuple[int, int], Any]) -> None:
        """Take the values of all operations so far. Without one, the program ended before it."""
        own = {number: values.get((self.index, number)) for number in range(len(self.operations))}
        self._values = {number: _decoded(value) for number, value in own.items() if (self.index, number) in values}
        if len(self._values) < len(self.operations):
            self.passed = False

    def _value(self, number: int) -> Any:
        value = self._values[number]
        if isinstance(value, _Raised):
            kind = getattr(builtins, value.name, None)
            raise kind() if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(value.name)
        return Remote(self, f"r[{self.index},{number}]") if isinstance(value, _Object) else value


class Names(dict[str, Any]):
    """Globals of a test: what it defines, builtins, modules of the standard library, else names of the program."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(__name__="test")
        self._attempt = attempt

    def __missing__(self, name: str) -> Any:
        if name not in self._attempt.tests.defined:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in self._attempt.tests.modules:
                return importlib.import_module(name)
        return Remote(self._attempt, f"g[{name!r}]")


class Remote:
    """A function, class or object of the program, which is equal to itself alone."""

    __slots__ = ("_attempt", "_expression")

    def __init__(self, attempt: Attempt, expression: str) -> None:
        object.__setattr__(self, "_attempt", attempt)
        object.__setattr__(self, "_expression", expression)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return self._attempt.ask(f"{self._expression}({', '.join(given)})")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._attempt.ask(f"{self._expression}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._attempt.ask(f"setattr({self._expression}, {name!r}, {value!r})")

    def __getitem__(self, key: Any) -> Any:
        return self._attempt.ask(f"{self._expression}[{key!r}]")

    def __len__(self) -> int:
        return int(self._attempt.ask(f"len({self._expression})"))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._attempt.ask(f"list({self._expression})"))

    def __repr__(self) -> str:
        return self._expression


@dataclass(frozen=True, slots=True)
class _Raised:
    name: str


class _Object:
    """A value of another type, equal to itself alone."""


def _decoded(value: Any) -> Any:
    """Return the value that `runner.encoded` encoded; of what it would not write, an object."""
    if isinstance(value, SCALARS):
        return value
    try:
        if isinstance(value, list):
            return [_decoded(each) for each in value]
        ((kind, content),) = value.items()
        return _of_kind(kind, content)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return _Object()


def _of_kind(kind: str, content: Any) -> Any:
    if kind in ("object", "raised"):
        return _Object() if kind == "object" else _Raised(str(content))
    if kind == "dict":
        return {_decoded(key): _decoded(value) for key, value in content}
    plain = {"tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes}
    return complex(*content) if kind == "complex" else plain[kind](_decoded(each) for each in content)


@contextlib.contextmanager
def limited(deadline: float) -> Iterator[None]:
    """Leave the block at the deadline: values of the program may make a test endless. For the main thread."""

    def raise_late(number: int, frame: Any) -> None:
        raise _Late

    previous = signal.signal(signal.SIGALRM, raise_late)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, deadline - time.monotonic()))
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Late:
        pass
    finally:
        signal.signal(signal.SIGALRM, previous)


def same_value(found: Any, expected: Any) -> bool:
    """Compare a result with JSON, which has no tuples; APPS has some results in a list of one."""
    found = _lists(found)
    return bool(found == expected or (isinstance(expected, list) and [found] == expected))


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
    with contextlib.suppress(InvalidOperation):
        return [Decimal(each) for each in found.split()] == [Decimal(each) for each in expected.split()]
    return False
