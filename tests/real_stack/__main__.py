"""The real packages of a device, installed and checked on a machine that has no such device.

    python -m tests.real_stack cuda                       # a fresh environment by launch/setup.sh: 10 GB
    python -m tests.real_stack npu                        # what package indexes have of Ascend's stack: 6 GB
    python -m tests.real_stack cuda --environment .venv   # one that setup made before; --only NAME runs one check

Every check runs in a process of its own. The outcome goes to `tests/bench/results/real_stack_cuda.json`, or where
`--outcomes` says. Needs gcc, for libraries that stand in for the driver. The exit code is 0 if every check passed.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.real_stack import cuda, npu, record
from tests.real_stack.check import ROOT, run_all, run_here
from tests.real_stack.environment import cuda_environment, npu_environment

STACKS = {"cuda": cuda, "npu": npu}
ENVIRONMENTS = {"cuda": cuda_environment, "npu": npu_environment}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.real_stack", description=__doc__)
    parser.add_argument("device", choices=sorted(STACKS))
    parser.add_argument("--environment", type=Path, help="a virtual environment to use instead of a fresh one")
    parser.add_argument("--folder", type=Path, help="where to make a fresh environment and keep it; default: nowhere")
    parser.add_argument(
        "--only", action="append", help="name of a check, may be repeated: its outcome replaces that in the file"
    )
    parser.add_argument("--outcomes", type=Path, help="the JSON file to write")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one check, in this process
    arguments = parser.parse_args()
    stack = STACKS[arguments.device]
    if arguments.run:
        run_here(next(check for check in stack.CHECKS if check.name == arguments.run))
        return 0

    with tempfile.TemporaryDirectory(prefix="real-stack-") as temporary:
        began = time.monotonic()
        if arguments.environment is None:
            tree, python = ENVIRONMENTS[arguments.device](arguments.folder or Path(temporary))
        else:
            tree, python = ROOT, arguments.environment.absolute() / "bin" / "python"
        installed = time.monotonic() - began

        checks = [check for check in stack.CHECKS if arguments.only is None or check.name in arguments.only]
        libraries = stack.prepare(python, Path(temporary))
        outcomes = run_all(arguments.device, checks, python, tree, libraries)
        packages = record.packages_of(python)

    failed = [name for name, outcome in outcomes.items() if outcome["outcome"] != "passed"]
    path = arguments.outcomes or record.path_of(arguments.device)
    if arguments.only is not None and path.exists():
        before = json.loads(path.read_text())
        found = {**before, "checks": before["checks"] | outcomes}
    else:
        seconds = None if arguments.environment else round(installed)
        found = {"install_seconds": seconds, "checks": outcomes}
    path.write_text(json.dumps({**found, "packages": packages}, indent=1) + "\n")
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} checks passed", *failed)
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
