"""The learning runs in the result file are those of today's presets, and a failed run is no result."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench import learning
from tests.compose import composed
from tests.docs.measured import load

RECORDED = [run for run in load("learning")["runs"] if run["name"] in learning.RUNS]


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run["name"])
def test_a_recorded_run_has_the_updates_that_its_name_composes_today(run: dict[str, object]) -> None:
    config = composed(*learning.RUNS[str(run["name"])].split())
    assert run["updates_per_step"] == config.algorithm.updates_per_step


def test_a_failed_run_is_no_result_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "learning.json"
    monkeypatch.setitem(learning.RUNS, "broken", "steps=0")
    monkeypatch.setattr(sys, "argv", ["learning", "broken", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        learning.main()
    assert ended.value.code == "1 of 1 runs failed and are not in the result: broken"
    assert not out.exists()

    output = capsys.readouterr()
    assert json.loads(output.out)["runs"] == []
    assert "steps=0 " in output.err
