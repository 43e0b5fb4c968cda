"""The comparisons with TRL count wall-clock time, and take TRL in the dtype that serves it better."""

from pathlib import Path

import pytest

from app.tracking.run_folder.timeline import Timeline
from tests.bench import end_to_end, real_models


def test_a_step_lasts_until_the_next_one_starts(tmp_path: Path) -> None:
    timeline = Timeline()
    for step, start in enumerate((10.0, 17.0, 30.5), 1):
        timeline.add("driver", "generate", start, start + 2, {"step": step})
        timeline.add("generate engine 0", "set/0@0", start, start + 1)
        timeline.add("driver", "train", start + 2, start + 5, {"step": step})
    timeline.write(tmp_path)
    assert end_to_end.step_seconds(tmp_path) == pytest.approx([7.0, 13.5], abs=1e-5)


def test_ratios_on_real_models_are_to_trl_in_its_better_dtype(tmp_path: Path) -> None:
    def run(speed: float) -> dict[str, object]:
        before = {"load_average": 0.0, "busy_cores": 0.0}
        return {**dict.fromkeys(real_models.NAMES, 1.0), "tokens_per_second": speed, "before": before}

    sides = (*real_models.SIDES, *real_models.LORA_SIDES)
    speeds = dict(zip(sides, (40.0, 50.0, 100.0, 200.0, 150.0, 60.0, 90.0), strict=True))
    found = real_models.summary([{side: run(speed) for side, speed in speeds.items()}], tmp_path, 4)
    ratios = found["tokens_per_second_over_trls_better_dtype"]
    assert {side: ratio["median"] for side, ratio in ratios.items()} == {
        "colocate float32": 2.0,
        "colocate bfloat16": 4.0,
        "fully_async float32": 3.0,
        "colocate float32 lora": 1.5,  # with adapters on both sides
    }
    assert found["busy"] is False
