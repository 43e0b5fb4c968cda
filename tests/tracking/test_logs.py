import logging
import logging.config
from pathlib import Path

import pytest
from omegaconf import OmegaConf

LOGGING = Path(__file__).parents[2] / "conf/hydra/job_logging/rich.yaml"


@pytest.fixture
def configured(tmp_path):
    """The log file of a logging setup as Hydra configures it; the setup is undone afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    settings = OmegaConf.to_container(OmegaConf.load(LOGGING), resolve=False)
    settings["handlers"]["file"]["folder"] = str(tmp_path / "logs")
    logging.config.dictConfig(settings)
    yield tmp_path / "logs/driver.log"
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def test_only_the_first_record_creates_the_folder(configured):
    assert not configured.parent.exists()
    logging.getLogger("app.some.part").info("hello")
    assert "INFO app.some.part: hello" in configured.read_text()


def test_warnings_go_to_stderr_and_the_file_and_other_records_to_the_file_only(configured, capsys):
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
