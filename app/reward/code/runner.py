"""Runs inside a sandbox, without the package: confines its process, then runs the program of a completion.

Stdin has frames: a length, a line break and a text. The first is the job, a literal of `code`, `limits` and `script`.
A script reads the rest of stdin and writes to stdout. For any other program, each further frame is an expression of
`g`, its globals, and `r`, the objects of earlier answers; each answer is a line of JSON, see `encoded`.

The program can forge answers. That gains nothing, since expected values never enter this process.
Imports are few: starting takes most of the time of a short program.
"""

from __future__ import annotations

import builtins
import os
import sys
from _collections import deque
from _json import encode_basestring_ascii as quote  # the package `json` takes as long to import as all else

if False:  # for the type checker
    from typing import Any

READ_FILE, READ_FOLDER = 0b0101, 0b1101  # of Landlock; and execute
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SIGKILL = 1, 22, 38, 9
COMMON = ("typing", "bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re", "string")
BY_ARGUMENTS = ("range", "Fraction", "Decimal", "date", "datetime", "time", "timedelta", "timezone")
objects: list[Any] = []


def confine(limits: dict[str, Any]) -> None:
    """Give up all rights that the program must not have, and die with the parent."""
    import resource

    # importing `ctypes` takes half as long as starting Python
    from _ctypes import CFuncPtr, _SimpleCData, dlopen, dlsym

    class Function(CFuncPtr):
        _flags_ = 1  # of C

    class Address(_SimpleCData):
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
    rules = syscall(CREATE_RULESET, READ_FOLDER.to_bytes(8, sys.byteorder), 8, 0)
    for path in [*limits["readable"], *sys.path] if rules >= 0 else ():
        if os.path.exists(path):
            folder = os.open(path, os.O_PATH)
            right = READ_FOLDER if os.path.isdir(path) else READ_FILE
            syscall(ADD_RULE, rules, 1, right.to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder), 0)
            os.close(folder)
    if rules >= 0 and syscall(RESTRICT_SELF, rules, 0):
        sys.exit("Landlock refused")

    for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE"):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limits[name], limits[name]))
    length = (len(limits["filter"]) // 8).to_bytes(8, sys.byteorder)
    if prctl(PR_SET_SECCOMP, 2, length + bytes(memoryview(Address(limits["filter"]))), 0, 0):
        sys.exit("the kernel refused the seccomp filter")


def encoded(value: Any) -> str:
    """Return a value as JSON; a type that JSON lacks becomes an object whose one key is the type."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, int):
        return int.__repr__(value) if int.bit_length(value) < 10_000 else '{"int":"' + hex(value) + '"}'
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    if isinstance(value, list):
        return "[" + ",".join(map(encoded, value)) + "]"
    name, parts = typed(value)
    return '{"' + name + '":' + encoded(parts) + "}"


def typed(value: Any) -> tuple[str, Any]:
    """Return the name and the parts of a type that JSON lacks; for objects of the program, their number in `r`."""
    kind, module = type(value), type(value).__module__
    if isinstance(value, dict):
        return "dict", [list(pair) for pair in dict.items(value)]
    if kind is deque:
        return "deque", list(value)
    for plain in (tuple, set, frozenset, bytes, bytearray):
        if isinstance(value, plain):
            return plain.__name__, list(value)
    if isinstance(value, complex):
        return "complex", [value.real, value.imag]
    if isinstance(value, type) and (value.__module__ == "builtins" or issubclass(value, BaseException)):
        return "class", [each.__name__ for each in value.__mro__]
    if module in ("builtins", "fractions", "decimal", "datetime") and kind.__name__ in BY_ARGUMENTS:
        return kind.__name__, list(value.__reduce__()[1])
    objects.append(value)
    return "object", len(objects) - 1


def do(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of the program. If it returns nothing but changes its arguments, return those."""
    given = [*args, *kwargs.values()]
    before = encoded(given)
    result = function(*args, **kwargs)
    return ("changed", given) if result is None and encoded(given) != before else ("value", result)


def serve(names: dict[str, Any], stdin: int, results: int) -> None:
    """Answer one expression after another."""
    write, encode, next_frame = os.write, encoded, frame  # the program may replace them

    def send(kind: str, value: Any) -> None:
        left = f'["{kind}",{encode(value)}]\n'.encode()
        while left:
            left = left[write(results, left) :]

    def lent(number: int) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            send("call", [number, list(args), kwargs])
            kind, value = eval(next_frame(stdin), names)
            if kind == "raised":
                raise value
            return value

        return function

    names |= {"operator": __import__("_operator"), "r": objects, "do": do, "lent": lent}
    while expression := next_frame(stdin):
        try:
            send(*eval(expression, names))
        except BaseException as error:
            args = [each for each in error.args if isinstance(each, str | int | float)]
            send("raised", [[each.__name__ for each in type(error).__mro__], args])


def frame(stdin: int) -> bytes:
    """Read a frame and not a byte more; empty at the end."""
    digits = text = b""
    while (byte := os.read(stdin, 1)) not in (b"\n", b""):
        digits += byte
    while len(text) < int(digits or b"0") and (piece := os.read(stdin, int(digits) - len(text))):
        text += piece
    return text


def main() -> None:
    """Read the job, and run it."""
    job = eval(frame(0))
    silent = os.open(os.devnull, os.O_RDWR)
    confine(job["limits"])

    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module `site` does, which is not loaded
    module = type(sys)("__main__" if job["script"] else "solution")
    sys.modules[module.__name__] = module
    code = compile(job["code"], module.__name__, "exec")
    if job["script"]:
        exec(code, module.__dict__)
        return

    stdin, results = os.dup(0), os.dup(1)
    os.dup2(silent, 0)
    os.dup2(silent, 1)
    if "class Solution" in job["code"]:  # LeetCode's form, whose programs use these names without an import
        for each in map(__import__, COMMON):
            public = {name: getattr(each, name) for name in getattr(each, "__all__", dir(each)) if name[0] != "_"}
            vars(builtins).update({**public, each.__name__: each, **vars(builtins)})
    exec(code, module.__dict__)
    serve({"g": module.__dict__, "nan": float("nan"), "inf": float("inf")}, stdin, results)
    os._exit(0)  # without what the program registered for its end


main()
