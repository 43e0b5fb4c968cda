"""What runs inside a sandbox: it confines itself, and then runs the program of a completion. It is passed as text.

Its stdin has frames, each a length, a line break and a text. The first is the job, a literal of `code`, `limits` and
`script`. A script reads the rest of stdin and writes to stdout. Of another program each further frame is an expression
of `g`, its globals, and `r`, the objects of earlier answers; the answer is a line of JSON, see `encoded`.

The program can forge any answer. That gains nothing: what is expected never enters this process.
It imports little, since its start is most of the time that a short program takes.
"""

from __future__ import annotations

import builtins
import os
import sys
from _json import encode_basestring_ascii as quote  # the package `json` takes as long to import as all else

if False:  # for the type checker
    from collections.abc import Callable, Sequence
    from typing import Any

READ_FILE, READ_FOLDER = 0b0101, 0b1101  # of Landlock; and execute
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SIGKILL = 1, 22, 38, 9
COMMON = ("typing", "bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re", "string")
BY_ARGUMENTS = ("range", "Fraction", "Decimal", "date", "datetime", "time", "timedelta", "timezone")
objects: list[Any] = []


def confine(limits: dict[str, Any]) -> None:
    """Give up what the program must not have, and die with the parent."""
    import resource
    from _ctypes import CFuncPtr, _SimpleCData, dlopen, dlsym  # `ctypes` takes half as long to import as Python to start

    class Function(CFuncPtr):
        _flags_ = 1  # of C

    class Address(_SimpleCData):  # type: ignore[type-arg]
        _type_ = "z"

    if os.getuid() == 0:
        # the standard library stays readable through its descriptors, even below a folder of root's own
        sys.path[:] = [f"/proc/self/fd/{os.open(each, os.O_PATH)}" for each in sys.path if os.path.isdir(each)]
        os.setgroups([])
        os.setresgid(*[limits["uid"]] * 3)
        os.setresuid(*[limits["uid"]] * 3)

    libc = dlopen(None, 0)  # type: ignore[arg-type]  # None: what this process has loaded
    prctl, syscall = (Function(dlsym(libc, name)) for name in ("prctl", "syscall"))
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != limits["parent"]:
        sys.exit("the parent has ended already")
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)

    # Landlock has had these three rights from its first version, and the filter refuses all writing
    handled = READ_FOLDER.to_bytes(8, sys.byteorder)
    rules = syscall(CREATE_RULESET, handled, 8, 0)
    for path in [*limits["readable"], *sys.path] if rules >= 0 else ():
        try:
            folder = os.open(path, os.O_PATH)
        except OSError:
            continue
        right = READ_FOLDER if os.path.isdir(path) else READ_FILE
        syscall(ADD_RULE, rules, 1, right.to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder), 0)
        os.close(folder)
    if rules >= 0 and syscall(RESTRICT_SELF, rules, 0):
        sys.exit("Landlock refused")

    for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE"):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limits[name], limits[name]))
    instructions = limits["filter"]
    length = (len(instructions) // 8).to_bytes(8, sys.byteorder)
    if prctl(PR_SET_SECCOMP, 2, length + bytes(memoryview(Address(instructions))), 0, 0):  # type: ignore[arg-type]
        sys.exit("the kernel refused the seccomp filter")


def encoded(value: object) -> str:
    """Return a value as JSON: plain types as they are, other standard ones as an object of one key, their type."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return "[" + ",".join(map(encoded, value)) + "]"
    if isinstance(value, int):
        return int.__repr__(value) if int.bit_length(value) < 10_000 else '{"int":"' + hex(value) + '"}'
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    return encoded_other(value)


def encoded_other(value: Any) -> str:
    """Return a value that JSON lacks; for an object of the program, its number in `r`."""
    kind = type(value)
    if isinstance(value, dict):
        return '{"dict":' + encoded([list(pair) for pair in dict.items(value)]) + "}"
    if isinstance(value, complex):
        return '{"complex":' + encoded([value.real, value.imag]) + "}"
    if isinstance(value, type) and (value.__module__ == "builtins" or issubclass(value, BaseException)):
        return '{"class":' + encoded([each.__name__ for each in value.__mro__]) + "}"
    for plain in (tuple, set, frozenset, bytes, bytearray):
        if isinstance(value, plain):
            return '{"' + plain.__name__ + '":' + encoded(list(value)) + "}"
    if kind.__module__ == "collections" and kind.__name__ == "deque":
        return '{"deque":' + encoded(list(value)) + "}"
    if kind.__module__ in ("builtins", "fractions", "decimal", "datetime") and kind.__name__ in BY_ARGUMENTS:
        return '{"' + kind.__name__ + '":' + encoded(list(value.__reduce__()[1])) + "}"
    objects.append(value)
    return '{"object":' + str(len(objects) - 1) + "}"


class Changed(list):  # type: ignore[type-arg]
    """Arguments after a call that changed them, and returned nothing."""


def do(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of the program."""
    given = [*args, *kwargs.values()]
    before = encoded(given)
    result = function(*args, **kwargs)
    return Changed(given) if result is None and encoded(given) != before else result


class Frames:
    """Expressions on stdin, and their answers."""

    def __init__(self, stdin: int, results: int, names: dict[str, Any]) -> None:
        self.stdin, self.results, self.write = stdin, results, os.write
        self.names = {**names, "r": objects, "do": do, "call": self.call, "throw": self.throw, "loads": self.loads}

    def send(self, line: str) -> None:
        left = f"{line}\n".encode()
        while left:
            left = left[self.write(self.results, left) :]

    def call(self, number: int) -> Callable[..., Any]:
        """Return a function of the test."""

        def function(*args: Any, **kwargs: Any) -> Any:
            self.send('{"call":' + encoded([number, list(args), kwargs]) + "}")
            return eval(frame(self.stdin), self.names)

        return function

    def throw(self, error: BaseException) -> None:
        raise error

    def loads(self, text: bytes) -> Any:
        import pickle

        return pickle.loads(text)

    def answer(self, expression: bytes) -> None:
        try:
            value = eval(expression, self.names)
            line = '{"changed":' + encoded(list(value)) + "}" if isinstance(value, Changed) else encoded(value)
        except BaseException as error:
            names = [each.__name__ for each in type(error).__mro__]
            line = '{"raised":' + encoded([names, [each for each in error.args if isinstance(each, str | int)]]) + "}"
        self.send(line)


def frame(stdin: int) -> bytes:
    """Read a frame, and no byte more; without one, nothing."""
    digits = b""
    while (byte := os.read(stdin, 1)) not in (b"\n", b""):
        digits += byte
    text = b""
    while len(text) < int(digits or b"0") and (piece := os.read(stdin, int(digits) - len(text))):
        text += piece
    return text


def provide() -> None:
    """Add the names that programs of LeetCode's form use without an import, except those of builtins."""
    for module in map(__import__, COMMON):
        public = getattr(module, "__all__", None) or [each for each in dir(module) if each[0] != "_"]
        found = {module.__name__: module, **{each: getattr(module, each) for each in public}}
        vars(builtins).update({name: value for name, value in found.items() if not hasattr(builtins, name)})


def main() -> None:
    """Read the job, and run it."""
    constants = {"nan": float("nan"), "inf": float("inf")}
    job = eval(frame(0), constants)
    silent = os.open(os.devnull, os.O_RDWR)
    if job["limits"]:
        confine(job["limits"])

    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module `site` does, which is not loaded
    module = type(sys)("__main__" if job["script"] else "solution")
    sys.modules[module.__name__] = module
    code = compile(job["code"], module.__name__, "exec")
    if job["script"]:
        exec(code, module.__dict__)
        return

    frames = Frames(os.dup(0), os.dup(1), {**constants, "g": module.__dict__})
    os.dup2(silent, 0)
    os.dup2(silent, 1)
    if "class Solution" in job["code"]:
        provide()
    exec(code, module.__dict__)
    while expression := frame(frames.stdin):
        frames.answer(expression)
    os._exit(0)  # without what the program registered for its end


main()
