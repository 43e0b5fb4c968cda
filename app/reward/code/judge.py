"""Whether a program passes a row's tests. What is expected stays on this side, and the program in its sandbox.

Tests run in a fork of this process, as trusted as the rows, on a `Remote` for each object of the program. What they do
with one is an expression that the program's process evaluates. Only values of Python's standard types come back; any
other is a `Remote` again, which is equal to nothing else, so that no `__eq__` of the program decides.

Invariants:
- The fork is killed at the deadline, whatever a test does with a value, or catches.
- Once the program has ended, the fork ends: no test passes because it takes that for an exception of the program.
"""

import builtins
import datetime
import importlib
import json
import os
import pickle
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from app.reward.code.row_tests import Asserts, Calls, Stdin, Tests
from app.reward.code.sandbox import Program, Sandbox, SandboxError, read
from app.worker.process import die_with_parent

ATOMS = (type(None), bool, int, float, str, bytes)
# How a value is made of what `runner.encoded` wrote below its type: of one argument, or of several
OF_ONE: Mapping[str, Callable[[Any], Any]] = {
    **{each.__name__: each for each in (dict, tuple, set, frozenset, bytes, bytearray, deque)},
    "int": lambda text: int(text, 16),
}
OF_SEVERAL: Mapping[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (complex, range, Fraction, Decimal)},
    **{name: getattr(datetime, name) for name in ("date", "datetime", "time", "timedelta", "timezone")},
}


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
        if isinstance(tests, Stdin):
            return sum(self._until_failed(self._scripts(code, tests, deadline)))
        exam = in_calls if isinstance(tests, Calls) else in_asserts
        with self.sandbox.started(code, self.timeout_s) as program:
            return sum(forked(lambda: self._until_failed(exam(program, tests)), deadline))

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
            yield output.ok and same_lines(output.text.decode(errors="replace"), expected)


def forked(exam: Callable[[], Iterator[bool]], deadline: float) -> list[bool]:
    """Return what an exam yields until the deadline, in a fork of this process. Raises `SandboxError` as it does."""
    parent = os.getpid()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(parent)
            sys.set_int_max_str_digits(0)
            for passed in exam():
                os.write(writable, b"1" if passed else b"0")
        except SandboxError as error:
            os.write(writable, f"!{error}".encode())
        finally:
            os._exit(0)

    os.close(writable)
    try:
        verdicts, _, error = read(readable, deadline).partition(b"!")
    finally:
        os.close(readable)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if error:
        raise SandboxError(error.decode())
    return [each == ord("1") for each in verdicts]


def in_calls(program: Program, tests: Calls) -> Iterator[bool]:
    """Yield for each call whether it returns what it shall."""
    session = Session(program)
    name = repr(tests.function)
    function = f"(g[{name}] if {name} in g else getattr(g['Solution'](), {name}))"
    calls = [f"{function}({', '.join(map(session.source, given))})" for given, _ in tests.cases]
    for line, (_, expected) in zip(program.ask(calls), tests.cases, strict=False):
        yield same_value(session.read(line), expected)


def in_asserts(program: Program, tests: Asserts) -> Iterator[bool]:
    """Yield for each statement whether it ends without an exception, after it asked the program for what it defines."""
    for statement in tests.cases:
        random.seed(0)  # a test that draws its inputs draws the same for each program
        session = Session(program)
        names = Names(session, tests)
        try:
            exec(compile(tests.setup, "setup", "exec"), names)
            exec(compile(statement, "test", "exec"), names)
        except BaseException:  # also what the program's values make a test raise
            yield False
        else:
            yield session.asked and not session.lacking


@dataclass(frozen=True, slots=True)
class Special:
    """An answer that is no value: `raised`, `changed` (arguments), or `call` (of a function that the test lent)."""

    kind: str
    content: Any


class Session:
    """A test's side of a program.

    Attributes:
        asked: The program has answered.
        lacking: It does not define a name that the test uses.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lent: list[Callable[..., Any]] = []
        self._classes: dict[str, type] = {}
        self.asked = False
        self.lacking = False

    def ask(self, expression: str) -> Any:
        """Return the value of an expression, or raise what it raised. Without an answer, the program has ended."""
        answer = self.read(next(self._program.ask([expression]), b""))
        while isinstance(answer, Special) and answer.kind == "call":
            answer = self.read(next(self._program.ask([self._called(*answer.content)]), b""))
        self.asked = True
        if isinstance(answer, Special) and answer.kind == "raised":
            raise answer.content
        return answer

    def name(self, name: str) -> Any:
        """Return a global of the program."""
        try:
            return self.ask(f"g[{name!r}]")
        except KeyError:
            self.lacking = True
            raise NameError(name) from None

    def call(self, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of the program. Where it returns nothing, its changes of the arguments are made here too."""
        result = self.ask(f"do({function}, {self.source(list(args))}, {self.source(dict(kwargs))})")
        if not isinstance(result, Special):
            return result
        for given, changed in zip([*args, *kwargs.values()], result.content, strict=True):
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
            pairs = (f"{self.source(key)}: {self.source(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        try:
            return f"loads({pickle.dumps(value)!r})"
        except (pickle.PicklingError, AttributeError, TypeError):
            if not callable(value):
                raise
        self._lent.append(value)
        return f"call({len(self._lent) - 1})"

    def _called(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        try:
            return self.source(self._lent[number](*args, **kwargs))
        except Exception as error:
            return f"throw({self.source(error)})"

    def read(self, line: bytes) -> Any:
        """Return an answer. Without one, or with what `runner.encoded` would not write, the exam is over."""
        try:
            answer = json.loads(line)
            if not isinstance(answer, dict) or answer.keys().isdisjoint(("raised", "changed", "call")):
                return self._decoded(answer)
            ((kind, content),) = answer.items()
            content = self._decoded(content)
            if kind == "raised":
                names, args = content
                error = self._class(names)
                content = error.__new__(error, *args)
                assert isinstance(content, BaseException)
            return Special(kind, content)
        except Exception:
            os._exit(0)

    def _decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decoded(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        content = self._decoded(content)
        if kind == "object":
            return Remote(self, f"r[{content:d}]")
        if kind == "class":
            return self._class(content)
        return OF_ONE[kind](content) if kind in OF_ONE else OF_SEVERAL[kind](*content)

    def _class(self, names: Sequence[str]) -> type:
        """Return the builtin class of the first of these names; else a class of that name, derived from the others."""
        known = getattr(builtins, names[0], None) or self._classes.get(names[0])
        if not isinstance(known, type):
            known = self._classes[names[0]] = type(names[0], (self._class(names[1:]),), {})
        return known


class Names(dict[str, Any]):
    """Globals of a test: what it defines, builtins, modules of the standard library, else names of the program."""

    def __init__(self, session: Session, tests: Asserts) -> None:
        super().__init__(__name__="test")
        self._session = session
        self._tests = tests

    def __missing__(self, name: str) -> Any:
        if name not in self._tests.defined:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in self._tests.modules:
                return importlib.import_module(name)
        return self._session.name(name)


# What Python does with an object, as an expression of it and of further operands. Comparisons are left out: the
# program's own would decide a test.
OPERATIONS = {
    **{name: f"{name}({{0}})" for name in ("len", "bool", "str", "repr", "int", "float", "abs", "iter", "next")},
    **{"neg": "-{0}", "pos": "+{0}", "invert": "~{0}", "getitem": "{0}[{1}]", "instancecheck": "isinstance({1}, {0})"},
    **{"setattr": "setattr({0}, {1}, {2})", "setitem": "{0}.__setitem__({1}, {2})", "delitem": "{0}.__delitem__({1})"},
    **{"enter": "{0}.__enter__()", "exit": "{0}.__exit__(None, None, None)"},
}
BINARY = dict(add="+", sub="-", mul="*", truediv="/", floordiv="//", mod="%", pow="**", matmul="@")
for _name, _symbol in BINARY.items() | {"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}.items():
    OPERATIONS |= {_name: f"{{0}} {_symbol} {{1}}", f"r{_name}": f"{{1}} {_symbol} {{0}}"}


class Remote:
    """A function, class or object of the program, which is equal to itself alone."""

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


def _operation(template: str) -> Callable[..., Any]:
    def method(self: Remote, *operands: Any) -> Any:
        return self._session.ask(template.format(*map(self._session.source, (self, *operands))))

    return method


for _name, _template in OPERATIONS.items():
    setattr(Remote, f"__{_name}__", _operation(_template))


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
    words = [found.split(), expected.split()]
    try:
        return len(words[0]) == len(words[1]) and list(map(Decimal, words[0])) == list(map(Decimal, words[1]))
    except InvalidOperation:
        return False
