"""What runs inside a sandbox: it confines itself, and then runs the program of a completion. It is passed as text.

Its stdin has the length of the job and a line break, the job as a literal, and then what the program reads. A job is

    {"code": …, "limits": …, "operations": None}                        run the code as a script
    {"code": …, "limits": …, "operations": [(test, number, "g['f'](3)"), …]}   and these expressions, one after another

Each operation writes a JSON line, `[test, number, value]`; no line follows after the one that ends the process. In an
expression, `g` are the program's globals and `r[test, number]` is the value of an earlier operation.

The program can forge any line here. That gains nothing: what is expected never enters this process.
It imports little, since its start is most of the time that a short program takes.
"""

from __future__ import annotations

import builtins
import os
import sys
from _json import encode_basestring_ascii as quote  # the package `json` takes as long to import as all else

if False:  # for the type checker
    from collections.abc import Sequence
    from typing import Any

FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # Landlock's rights by the version of its interface; 16 since version 5
READ_FILE, READ_FOLDER = 0b0101, 0b1101  # and execute
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, SIGKILL = 1, 38, 9


def confine(limits: dict[str, Any]) -> None:
    """Give up what the program must not have. What it forks inherits all of it."""
    import resource

    if os.getuid() == 0:
        # the standard library stays readable through its descriptors, even below a folder of root's own
        sys.path[:] = [f"/proc/self/fd/{os.open(each, os.O_PATH)}" for each in sys.path if os.path.isdir(each)]
        os.setgroups([])
        os.setresgid(*[limits["uid"]] * 3)
        os.setresuid(*[limits["uid"]] * 3)
    if limits["process"]:
        restrict(limits["readable"], limits["parent"])

    for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE"):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limits[name], limits[name]))


def restrict(readable: Sequence[str], parent: int) -> None:
    """Die with the parent, and let Landlock, where the kernel has it, refuse files, signals and TCP."""
    from _ctypes import CFuncPtr, dlopen, dlsym  # the package `ctypes` takes half as long to import as Python to start

    class Function(CFuncPtr):
        _flags_ = 1  # of C

    libc = dlopen(None, 0)  # type: ignore[arg-type]  # None: what this process has loaded
    prctl, syscall = (Function(dlsym(libc, name)) for name in ("prctl", "syscall"))
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended already")
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    version = syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return

    handled = (1 << FS_RIGHTS.get(version, 16)) - 1
    network = 3 if version >= 4 else 0
    scoped = 3 if version >= 6 else 0
    ruleset = b"".join(each.to_bytes(8, sys.byteorder) for each in (handled, network, scoped))
    rules = syscall(CREATE_RULESET, ruleset, len(ruleset), 0)
    for path in [*readable, *sys.path]:
        try:
            folder = os.open(path, os.O_PATH)
        except OSError:
            continue
        right = READ_FOLDER if os.path.isdir(path) else READ_FILE
        syscall(ADD_RULE, rules, 1, right.to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder), 0)
        os.close(folder)
    if syscall(RESTRICT_SELF, rules, 0):
        sys.exit("Landlock refused")
    os.close(rules)


def encoded(value: object) -> str:
    """Return a value of Python's plain types as JSON; of anything else, the name of its type."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return "[" + ",".join(map(encoded, value)) + "]"
    return encoded_number(value) if isinstance(value, int | float) else encoded_other(value)


def encoded_number(value: float) -> str:
    """Return a number as JSON, also of a subclass, whose own text does not count."""
    if isinstance(value, int):
        return int.__repr__(value)
    text = float.__repr__(value)
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)


def encoded_other(value: object) -> str:
    """Return a value that JSON lacks as an object of one key, its type."""
    if isinstance(value, dict):
        pairs = [list(pair) for pair in dict.items(value)]
        return '{"dict":' + encoded(pairs) + "}"
    if isinstance(value, complex):
        return '{"complex":' + encoded([value.real, value.imag]) + "}"
    for kind in (tuple, set, frozenset, bytes):
        if isinstance(value, kind):
            return '{"' + kind.__name__ + '":' + encoded(list(value)) + "}"
    return '{"object":' + quote(type(value).__name__) + "}"


def operate(module: Any, operations: Sequence[tuple[int, int, str]], results: int) -> None:
    """Evaluate operations, and write what comes of each."""
    write, encode = os.write, encoded
    values: dict[tuple[int, int], Any] = {}
    names = {"g": module.__dict__, "r": values, "nan": float("nan"), "inf": float("inf")}
    for test, number, expression in operations:
        try:
            values[test, number] = eval(expression, names)
            line = encode(values[test, number])
        except BaseException as error:
            line = '{"raised":' + quote(type(error).__name__) + "}"
        left = f"[{test},{number},{line}]\n".encode()
        while left:
            left = left[write(results, left) :]


def main() -> None:
    """Read the job, and run it."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # without a byte of what the program reads
        size = int(stdin.readline())
        text = b""
        while len(text) < size:
            text += stdin.read(size - len(text))

    job = eval(text, {"nan": float("nan"), "inf": float("inf")})
    silent = os.open(os.devnull, os.O_RDWR)
    if job["limits"]:
        confine(job["limits"])

    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module `site` does, which is not loaded
    operations = job["operations"]
    module = type(sys)("__main__" if operations is None else "solution")
    sys.modules[module.__name__] = module
    code = compile(job["code"], module.__name__, "exec")
    if operations is None:
        exec(code, module.__dict__)
        return

    results = os.dup(1)
    os.dup2(silent, 0)
    os.dup2(silent, 1)
    exec(code, module.__dict__)
    operate(module, operations, results)
    os._exit(0)  # without what the program registered for its end


main()
