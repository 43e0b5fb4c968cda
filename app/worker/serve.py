"""The start of a worker process: it loads the handler and lets it serve the pipe.

Invariants:
- The worker dies with its parent, even if the parent is killed or code hangs: the kernel sends SIGKILL (Linux).
- Ctrl-C and SIGTERM are handled by the driver, so that jobs can be closed; the worker ignores them.
- Only the worker itself writes to the pipe. What a job prints goes to the log.
"""

import importlib
import os
import signal
import socket
import sys
from typing import Any

from app.utils.user_code import LoadError
from app.worker.process import die_with_parent
from app.worker.wire import Codec, Ready, Refused


def serve(descriptor: int, parent: int, module: str) -> None:
    """Serve the driver until it closes the pipe. Does not return, except when the handler cannot be loaded."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_the_driver)
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


def _leave_to_the_driver(number: int, frame: Any) -> None:
    """Do nothing. Unlike an ignored signal, this is not inherited by what a job starts."""
