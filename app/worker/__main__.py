"""The worker process: `<python> …/app/worker/__main__.py <pipe descriptor> <parent pid> <handler>`.

It is started by path, because its interpreter may not have this package installed. The package is then imported from
its folder alone: that folder's parent may hold the packages of another interpreter.
"""

import importlib.util
import json
import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MIN_PYTHON = (3, 11)


def import_package() -> None:
    """Make `app` importable without a search path that leads to it."""
    spec = importlib.util.spec_from_file_location(
        "app", os.path.join(PACKAGE, "__init__.py"), submodule_search_locations=[PACKAGE]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["app"] = module
    spec.loader.exec_module(module)


def main() -> None:
    """Serve the driver until it closes the pipe."""
    descriptor, parent, handler = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if sys.version_info < MIN_PYTHON:
        version = ".".join(map(str, sys.version_info[:3]))
        text = f"environment.python={sys.executable} is not accepted: it is Python {version}; give 3.11 or later."
        os.write(descriptor, json.dumps({"refused": text}).encode() + b"\n")
        return

    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path.pop(0)
    import_package()

    from app.worker.serve import serve

    serve(descriptor, parent, handler)


if __name__ == "__main__":
    main()
