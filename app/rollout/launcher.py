"""The main module of an SGLang server process.

SGLang spawns its children, which import this module again, so what stands at its top happens in every process of the
server (on a CPU they are forked and have it already, see plugin.py). The whole process group dies with the host that
started it, whatever its members are doing then: a watcher waits for the end of standard input, whose other end the host
holds. The key comes through the environment, so that no process list shows it, and no log record does.
"""

import logging
import os
import signal
import sys
from collections.abc import MutableMapping
from typing import Any

from app.device.torchvision_shim import define_operators
from app.rollout.server import KEY_VARIABLE, PARENT_VARIABLE
from app.utils.process import die_with_parent

EXPANDABLE = "expandable_segments"
# SGLang would take over a minute to leave after one of its processes crashed; whoever wants the dumps sets them to 1
CRASH_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


def main() -> None:
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    key = os.environ.pop(KEY_VARIABLE)
    for variable in CRASH_DUMPS:
        os.environ.setdefault(variable, "0")
    if "--enable-memory-saver" in sys.argv:
        forbid_expandable_segments(os.environ)
    watch_host()
    hide_in_logs(key)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args([*sys.argv[1:], f"--api-key={key}"]))  # "=": a key may begin with a dash


def forbid_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Take them out of what torch's allocators are told (PYTORCH_…ALLOC_CONF): the memory saver refuses them."""
    for name, value in list(environment.items()):
        if name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF") and EXPANDABLE in value:
            kept = [option for option in value.split(",") if not option.strip().startswith(EXPANDABLE)]
            environment.pop(name)
            if kept:
                environment[name] = ",".join(kept)


def watch_host() -> None:
    """Fork a process that kills the group when the host ends: children that still start would outlive it."""
    if os.fork() == 0:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)


def hide_in_logs(secret: str) -> None:
    """SGLang logs all its arguments."""
    make = logging.getLogRecordFactory()

    def without_secret(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        message = record.getMessage()
        if secret in message:
            record.msg, record.args = message.replace(secret, "***"), None
        return record

    logging.setLogRecordFactory(without_secret)


define_operators()

if __name__ == "__main__":
    main()
