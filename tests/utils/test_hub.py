"""Hub ids where there is no network: one attempt, no log lines of the client, one sentence."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from huggingface_hub import constants

from app.config.model import ModelConfig
from app.data import records
from app.model.hf_directory import locate
from tests.refusals import refused


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Connections to the hub's address, each of which is cut at once."""
    made: list[None] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    connection, _ = server.accept()
                    made.append(None)  # first: the client may look as soon as it is cut off
                    connection.close()

        threading.Thread(target=cut, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield made
        server.shutdown(socket.SHUT_RDWR)


def read_rows() -> None:
    list(records.read("nobody/nothing-at-all", subset="main", split="test", key="data.path"))


def find_model() -> None:
    locate(ModelConfig(path="nobody/nothing-at-all"))


@pytest.mark.parametrize(
    ("ask", "key", "named"), [(read_rows, "data.path", "split test of subset main"), (find_model, "model.path", "")]
)
def test_a_hub_that_is_gone_is_asked_once_and_quietly(
    ask: Callable[[], None],
    key: str,
    named: str,
    connections: list[None],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.DEBUG), refused(key, "nobody/nothing-at-all", named):
        ask()
    assert len(connections) == 1
    assert capfd.readouterr().err == ""
    assert not constants.HF_HUB_OFFLINE
    for record in caplog.records:
        assert record.levelno < logging.WARNING or not record.name.startswith(("huggingface_hub", "datasets"))
