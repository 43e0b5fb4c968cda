"""`environment=verifiers`: environments of the verifiers package, unmodified, in an interpreter of their own.

    python -m app environment=verifiers environment.id=<package> environment.python=<venv>/bin/python

verifiers renders a conversation by its `renderers` package and POSTs token ids to a loopback endpoint, which continues
the sequence that they begin with. So branches, compaction and parallel agents need nothing special here.

`environment.args` are verifiers' own: an `EnvConfig` with `taskset` and the agents by name.
`environment.args.tasks=100` takes the first 100 tasks only. `task.row["index"]` is the number of an episode's task.
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.environment.protocol import Policy, Task
from app.environment.verifiers.environment_host import Host, Settings, own_renderer
from app.utils.dotted_path import LoadError

PINS = "verifiers 0.4.x"


@dataclass(frozen=True, slots=True)
class Make:
    """Makes the environment of each episode."""

    host: Host
    info: Mapping[str, Any]  # for the driver

    def __call__(self) -> "VerifiersEpisode":
        return VerifiersEpisode(self.host)


@dataclass(frozen=True, slots=True)
class VerifiersEpisode:
    """The environment of one episode. What it holds, verifiers frees when the episode ends or is cancelled."""

    host: Host

    async def run(self, task: Task, policy: Policy) -> dict[str, float]:
        """Play the episode and return its scores, the reward first.

        Raises:
            EpisodeOver: It ran into a limit that its package does not handle.
            EnvironmentFailed: The package reports another error.
        """
        return await self.host.play(int(task.row["index"]), policy)


def make(settings: Mapping[str, Any]) -> Make:
    """Load an environment.

    Args:
        settings: `id`, the module to import; `args`; `renderer` and `limits` of the run; `list_tasks`, whether
            `info` is to have all tasks as `rows` of index, id, question and answer.

    Raises:
        LoadError: It cannot be used in this interpreter.
    """
    version = _installed()
    if version is None:
        raise LoadError(f"verifiers is not installed; install {PINS}")
    if not version.startswith("0.4."):
        raise LoadError(f"verifiers {version} is not supported; install {PINS}")

    args = dict(settings.get("args") or {})
    tasks = args.pop("tasks", None)
    if tasks is not None and (type(tasks) is not int or tasks < 1):
        raise LoadError(f"environment.args.tasks={json.dumps(tasks)} is not a number of tasks")

    _find_programs()
    choice = settings["renderer"]
    renderer = own_renderer(choice)
    host = Host(
        Settings(str(settings["id"]), args, tasks, settings["limits"]["max_turns"], str(choice["model_path"]), renderer)
    )
    rows = host.rows()
    if not rows:
        raise LoadError(f"{settings['id']} has no tasks")
    return Make(host, {"tasks": len(rows)} | ({"rows": rows} if settings.get("list_tasks") else {}))


def _installed() -> str | None:
    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_programs() -> None:
    """Let environments find the programs that are installed beside this interpreter, such as uv."""
    folder = os.path.dirname(sys.executable)
    path = os.environ.get("PATH", "")
    if folder not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, path])
