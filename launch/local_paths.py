"""Print the paths that settings name as they compose, one `setting=path` a line. Of a pattern, its folder.

    python launch/local_paths.py [group=choice] [key=value]

Absolute paths are found in any setting, arguments of your own rewards included. A setting that is named `...path` may
also have a relative one, or the id of a hub. A setting that is not accepted ends it with the application's sentence.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def paths(node: Any, key: str = "") -> Iterator[str]:
    """Yield `setting=path` for each path in these settings."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from paths(value, f"{key}.{name}" if key else name)
    elif isinstance(node, list):
        for value in node:
            yield from paths(value, key)
    elif isinstance(node, str) and "\n" not in node and (key.endswith("path") or re.match(r"/\w", node)):
        folder = re.split(r"[*?\[]", node, maxsplit=1)
        yield f"{key}={node if len(folder) == 1 else folder[0].rpartition('/')[0] or '.'}"


def jobs(arguments: Sequence[str]) -> list[list[str]]:
    """Return arguments that compose every value of a sweep: Hydra 1.3 shows no configuration with --multirun."""
    alternatives = [_values(each) for each in arguments if each not in ("-m", "--multirun")]
    if len(alternatives) == len(arguments):
        return [list(arguments)]
    return [[each[job % len(each)] for each in alternatives] for job in range(max(map(len, alternatives), default=1))]


def _values(argument: str) -> list[str]:
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException:
        return [argument]
    if not parsed.is_sweep_override():
        return [argument]
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]


if __name__ == "__main__":
    found: dict[str, None] = {}
    for job in jobs(sys.argv[1:]):
        command = [sys.executable, "-m", "app", *job, "--cfg", "job", "--resolve"]
        done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8")
        if done.returncode:
            sys.exit(done.returncode)
        found |= dict.fromkeys(paths(yaml.safe_load(done.stdout)))
    sys.stdout.buffer.write("\n".join([*found, ""]).encode())
