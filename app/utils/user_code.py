"""Import and try a user's code: rewards, rows, objectives, environments and trackers, by dotted paths."""

import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

IMPORT_TIMEOUT_S = 60.0


class LoadError(Exception):
    """A custom function or class cannot be imported or used. The message completes a sentence that names its path."""


def resolve(path: str) -> Callable[..., Any]:
    """Import the function or class at `package.module.name`, or deeper: `package.module.Class.method`.

    The working directory is searched last: it may have modules named as our dependencies.

    Raises:
        LoadError: There is no such function or class, or its module cannot be imported.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())

    names = path.split(".")
    for split in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:split])
        try:
            resolved: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # a shorter prefix may be the module
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise LoadError(f"module {module_name} needs a module that is missing ({error})") from error
        except Exception as error:  # custom modules can raise anything
            raise LoadError(f"module {module_name} cannot be imported ({error_text(error)})") from error

        for name in names[split:]:
            if not hasattr(resolved, name):
                raise LoadError(f"module {module_name} has no {'.'.join(names[split:])}")
            resolved = getattr(resolved, name)
        if not callable(resolved):
            raise LoadError("it is not a function or class")
        return resolved

    raise LoadError(f"there is no module {'.'.join(names[:-1])} (searched the working directory and PYTHONPATH)")


def require(
    key: str, path: str, accepted: str, attempt: Callable[[Any], str | None] = lambda found: None
) -> Callable[..., Any]:
    """Import a function or class and try it, in a thread of their own, since both may hang.

    `attempt` returns what is wrong with it, or raises. Raises `ConfigError` of `key`, which asks for `accepted`.
    """
    found: list[Any] = []
    problems: list[str | None] = []

    def run() -> None:
        try:
            found.append(resolve(path))
            problems.append(attempt(found[0]))
        except LoadError as error:
            problems.append(str(error))
        except (Exception, SystemExit) as error:  # custom modules can raise anything
            problems.append(error_text(error))

    thread = threading.Thread(target=run, name=f"import {path}", daemon=True)
    thread.start()
    thread.join(IMPORT_TIMEOUT_S)

    # Here, since workers in another interpreter import this module, and that may lack Hydra.
    from app.errors import ConfigError

    problem = problems[0] if problems else f"it was not imported and tried within {IMPORT_TIMEOUT_S:g} s"
    if problem is not None:
        raise ConfigError(key, path, accepted, problem)
    return found[0]


def error_text(error: BaseException) -> str:
    """Return type, first line and source location of an error, short enough for a sentence."""
    if isinstance(error, SyntaxError) and error.filename is not None:  # raised by the compiler
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"

    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{text} at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else text
