"""`environment.kind`: each kind is a module of this package with a function `make`."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from app.utils.user_code import LoadError, error_text

Make = Callable[[], Any]


def load_environment(settings: Mapping[str, Any]) -> Make:
    """Return the function that makes environments of this kind, from its module's `make`.

    The attribute `info` of that function, if there is one, goes to the driver. Raises `LoadError`, a sentence.
    """
    environment = settings["environment"]
    kind = environment["kind"]
    key = f"environment._target_={environment['target']}" if kind == "own" else f"environment={kind}"
    try:
        make: Callable[[Mapping[str, Any]], Make] = importlib.import_module(f"app.environment.{kind}").make
        return make({**settings, **environment})
    except ValueError as error:
        raise LoadError(str(error)) from error  # a sentence of our own
    except LoadError as error:
        problem = str(error)
    except Exception as error:  # custom code and packages can raise anything
        problem = error_text(error)
    raise LoadError(f"{key} cannot be used: {problem}; the interpreter is {sys.executable}.")
