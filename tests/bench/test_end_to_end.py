"""The comparison of the whole application counts wall-clock time and adds to files as it says."""

import json
from pathlib import Path

import pytest

from app.tracking.run_folder.timeline import Timeline
from tests.bench import end_to_end, trainer
from tests.bench.machine import earlier_result


def test_a_step_lasts_until_the_next_one_starts(tmp_path: Path) -> None:
    timeline = Timeline()
    for step, start in enumerate((10.0, 17.0, 30.5), 1):
        timeline.add("driver", "generate", start, start + 2, {"step": step})
        timeline.add("generate engine 0", "set/0@0", start, start + 1)
        timeline.add("driver", "train", start + 2, start + 5, {"step": step})
    timeline.write(tmp_path)
    assert end_to_end.step_seconds(tmp_path) == pytest.approx([7.0, 13.5], abs=1e-5)


def test_rounds_are_added_to_a_file_only_if_asked_and_it_exists(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert earlier_result(out, add=True) == {}
    out.write_text(json.dumps({"rounds": [1]}))
    assert earlier_result(out, add=True) == {"rounds": [1]}
    assert earlier_result(out, add=False) == {}


@pytest.mark.parametrize(
    ("main", "arguments"), [(end_to_end.main, ["--peer", "python", "--add"]), (trainer.main, ["--add"])]
)
def test_add_without_a_file_is_refused(
    main: object, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()  # type: ignore[operator]
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: --add needs --out FILE\n")
