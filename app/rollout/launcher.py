"""The main module of an SGLang server process.

SGLang spawns its children, which import this module again, so what stands at its top happens in every process of the
server. The process dies with the host that started it, and takes its children along. The key comes through the
environment, so that no process list shows it.
"""

import os
import sys

from app.device.torchvision import define_operators
from app.process import die_with_parent

KEY_VARIABLE = "POSTTRAIN_ENGINE_KEY"
PARENT_VARIABLE = "POSTTRAIN_ENGINE_PARENT"


def main() -> None:
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    key = os.environ.pop(KEY_VARIABLE)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args([*sys.argv[1:], "--api-key", key]))


define_operators()

if __name__ == "__main__":
    main()
