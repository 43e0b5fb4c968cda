"""The worker process: `<python> …/app/worker/__main__.py <pipe descriptor> <parent pid> <handler>`.

It is started by path, because its interpreter may not have this package installed. The package is then imported from
its folder alone: that folder's parent may hold the packages of another interpreter.

Invariants:
- The worker dies with its parent, even if the parent is killed or code hangs: the kernel sends SIGKILL (Linux).
- Ctrl-C and SIGTERM are handled by the driver, so that jobs can be closed; the worker ignores them.
- Only the worker itself writes to the pipe. What a job prints goes to the log.
"""

import importlib
import importlib.util
import json
import os
import signal
import socket
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MIN_PYTHON = (3, 11)


def import_package() -> None:
    """Make `app` importable without a search path that leads to it."""
    source = os.path.join(PACKAGE, "__init__.py")
    spec = importlib.util.spec_from_file_location("app", source, submodule_search_locations=[PACKAGE])
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
    serve(descriptor, parent, handler)


def serve(descriptor: int, parent: int, module: str) -> None:
    """Load the handler and let it serve the pipe. Does not return, except when the handler cannot be loaded."""
    from app.utils.user_code import LoadError
    from app.worker.process import die_with_parent
    from app.worker.wire import Codec, Ready, Refused

    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # unlike an ignored signal, this is not inherited by a job's processes
    os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))  # forked children must not inherit the pipe
    sys.path.insert(0, os.getcwd())  # only now, since it may have a folder named as this package

    pipe = socket.socket(fileno=descriptor)
    codec = Codec()
    first = pipe.makefile("rb").readline()  # nothing follows before Ready
    if first:
        try:
            handler = importlib.import_module(module).load(codec.decode(first).settings)
        except LoadError as error:
            pipe.sendall(codec.encode(Refused(str(error))))
            return

        pipe.sendall(codec.encode(Ready(dict(handler.info))))
        handler.serve(pipe)
    os._exit(0)  # without waiting for threads and tasks of the handler, which may hang


if __name__ == "__main__":
    main()
