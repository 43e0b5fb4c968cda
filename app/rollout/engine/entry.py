"""Main module of an SGLang server process: `python -m app.rollout.engine.entry <SGLang's flags>`.

SGLang spawns its children, and each imports this module again, so its top level runs in every process of the server.
(With app/cpu_engine/ they are forked and have it already.)

Invariants:
    - The process group dies with the host that started it, in any state: a watcher process waits for the end of
      standard input, whose other end the host holds.
    - No process list and no log shows the key: it is passed in the environment and masked in log records.
"""

import logging
import os
import signal
import sys
from collections.abc import MutableMapping
from typing import Any

from app.device.process_environment import EXPANDABLE, prepend_library_folders, without_expandable_segments
from app.device.torchvision_shim import define_operators
from app.rollout.engine.server import KEY_VARIABLE
from app.utils.process import PARENT_VARIABLE
from app.worker.process import die_with_parent

# With these dumps SGLang needs over a minute to exit after a crash. Set them to 1 to get them.
CRASH_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
# A package of models. A server whose model is among them does not import all others.
MODELS_VARIABLE, MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE", "app.rollout.engine.sglang_plugin.models"


def main(parent: int) -> None:
    """Run the server until it ends. `parent`: the process that started this one."""
    die_with_parent(parent)
    key = os.environ.pop(KEY_VARIABLE)
    for variable in CRASH_DUMPS:
        os.environ.setdefault(variable, "0")
    os.environ.setdefault(MODELS_VARIABLE, MODELS)
    if "--enable-memory-saver" in sys.argv:
        forbid_expandable_segments(os.environ)
        prepend_library_folders(os.environ)
    if os.fork() == 0:  # a process that kills the group when the host ends, children that are still starting included
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)
    mask_in_logs(key)

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from app.rollout.engine.sglang_plugin.entry_points import require_hooks

    load_plugins()
    require_hooks()
    run_server(prepare_server_args([*sys.argv[1:], f"--api-key={key}"]))  # "=": a key may begin with a dash


def forbid_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Remove `expandable_segments` from PYTORCH_…ALLOC_CONF: the memory saver does not support it."""
    for name, value in list(environment.items()):
        if name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF") and EXPANDABLE in value:
            environment.pop(name)
            if options := without_expandable_segments(value):
                environment[name] = options


def mask_in_logs(secret: str) -> None:
    """Replace a secret by *** in all log records. SGLang logs all its arguments."""
    make_record = logging.getLogRecordFactory()

    def make_masked_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        message = record.getMessage()
        if secret in message:
            record.msg = message.replace(secret, "***")
            record.args = None
        return record

    logging.setLogRecordFactory(make_masked_record)


define_operators()

if __name__ == "__main__":
    main(int(os.environ[PARENT_VARIABLE]))
