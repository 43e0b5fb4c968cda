import logging
import logging.config
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from app.start.output_folder import driver_log

LOGGING = Path(__file__).parents[2] / "conf/hydra/job_logging/rich.yaml"


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Path]:
    """The driver log of a run, with logging as Hydra configures it; the setup is undone afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logging.config.dictConfig(yaml.safe_load(LOGGING.read_text()))
    with driver_log(tmp_path):
        yield tmp_path / "logs/driver.log"
    root.handlers, root.level = handlers, level


def test_warnings_go_to_stderr_and_the_file_and_other_records_to_the_file_only(
    configured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not configured.parent.exists()  # the first record creates it
    log = logging.getLogger("app.some.part")
    log.info("quiet")
    log.warning("watch %s", "out")
    log.error("broken")
    assert capsys.readouterr().err == "warning: watch out\nerror: broken\n"
    assert [line.split(" ", 2)[2] for line in configured.read_text().splitlines()] == [
        "INFO app.some.part: quiet",
        "WARNING app.some.part: watch out",
        "ERROR app.some.part: broken",
    ]
