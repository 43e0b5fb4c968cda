"""The environment that the openenv package ships as a template, served by the package itself."""

import contextlib
import re
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.environment.interpreters import interpreter
from tests.waiting import until

NAMES = {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo"}


@dataclass
class EchoServer:
    url: str
    process: "subprocess.Popen[bytes]"


@contextlib.contextmanager
def echo_server(folder: Path, sessions: int) -> Iterator[EchoServer]:
    """Serve the template, unchanged but for its names and the number of sessions."""
    python = interpreter("openenv==0.10.0")
    find = "import openenv.cli, pathlib; print(pathlib.Path(openenv.cli.__file__).parent / 'templates' / 'openenv_env')"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True, timeout=120)
    _instantiate(Path(found.stdout.strip().splitlines()[-1]), folder, sessions)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(python), "-m", "uvicorn", "server.app:app", "--port", str(port), "--log-level", "warning"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process:
        try:
            until(lambda: _answers(port) or process.poll() is not None, 120)
            assert process.poll() is None, (folder / "log").read_text()
            yield EchoServer(f"ws://127.0.0.1:{port}", process)
        finally:
            process.kill()


def _instantiate(template: Path, folder: Path, sessions: int) -> None:
    for path in template.rglob("*.py"):
        text = path.read_text()
        for name, value in NAMES.items():
            text = text.replace(name, value)
        text = re.sub(r"max_concurrent_envs=1\b", f"max_concurrent_envs={sessions}", text)
        target = folder / str(path.relative_to(template)).replace("__ENV_NAME__", "echo")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False
