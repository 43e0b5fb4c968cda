"""`hf upload` of an export, as the page on checkpoints shows it, to a server that stands in for the hub."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

REPOSITORY = "my-org/my-model"


class Hub(BaseHTTPRequestHandler):
    """Takes a repository's files inside of its commits, as the hub takes small ones."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    created: list[dict[str, str]]

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        repository = f"http://{self.headers['Host']}/{REPOSITORY}"
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.reply({"url": repository})
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            self.reply({"files": [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in names]})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            added = [each["value"] for each in lines if each["key"] == "file"]
            self.files.update({each["path"]: base64.b64decode(each["content"]) for each in added})
            self.reply({"commitUrl": f"{repository}/commit/abc", "commitOid": "abc"})
        else:
            self.reply({})

    def reply(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.files, Hub.created = {}, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_command_of_the_page_uploads_every_file_of_an_export(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    (command,) = re.findall(r"^    hf (upload .*)$", (ROOT / "docs" / "checkpoints.md").read_text(), re.M)
    export = tmp_path / "export"
    (export / "adapter").mkdir(parents=True)
    (export / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
    (export / "model.safetensors").write_bytes(bytes(range(256)))
    (export / "adapter" / "adapter_config.json").write_text("{}")

    words = command.replace("<run>", str(tmp_path)).split()
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_any",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run(
        [str(Path(sys.executable).with_name("hf")), *words],
        env={**os.environ, **settings, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [(each["organization"], each["name"]) for each in Hub.created] == [tuple(REPOSITORY.split("/"))]
    assert Hub.files == {
        str(file.relative_to(export)): file.read_bytes() for file in export.rglob("*") if file.is_file()
    }
