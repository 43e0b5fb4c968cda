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
from typing import Any

from app.environment.verifiers.environment_host import Host, own_renderer
from app.utils.user_code import LoadError

PINS = "verifiers 0.4.x"


def make(settings: Mapping[str, Any]) -> Host:
    """Load the environment `id`, which plays all episodes of a worker. Raises `LoadError` if it cannot be used.

    With `list_tasks`, its `info` has all tasks as `rows` of index, id, question and answer.
    """
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise LoadError(f"verifiers is not installed; install {PINS}") from None
    if not version.startswith("0.4."):
        raise LoadError(f"verifiers {version} is not supported; install {PINS}")

    args = dict(settings.get("args") or {})
    tasks = args.pop("tasks", None)
    if tasks is not None and (type(tasks) is not int or tasks < 1):
        raise LoadError(f"environment.args.tasks={json.dumps(tasks)} is not a number of tasks")

    folder, path = os.path.dirname(sys.executable), os.environ.get("PATH", "")
    if folder not in path.split(os.pathsep):  # programs that are installed beside this interpreter, such as uv
        os.environ["PATH"] = os.pathsep.join([folder, path])
    choice = settings["renderer"]
    renderer = own_renderer(choice)
    host = Host(str(settings["id"]), args, tasks, settings["limits"]["max_turns"], str(choice["model_path"]), renderer)
    rows = host.rows()
    if not rows:
        raise LoadError(f"{settings['id']} has no tasks")
    host.info = {"tasks": len(rows)} | ({"rows": rows} if settings.get("list_tasks") else {})
    return host
