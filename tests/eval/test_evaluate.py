"""When evaluations are due, and what they measure."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import app.mode.eval
from app.config import Mode
from app.config.eval import EvalConfig
from app.config.placement import PlacementKind
from app.errors import RunError
from app.eval import is_due, measure
from app.start.inputs import CheckStage, RunInputs
from tests.algorithm.groups import group
from tests.simulation import World, config, run_virtual


@pytest.mark.parametrize(
    ("every", "before_train", "expected"),
    [(0, True, [0, 6]), (0, False, [6]), (4, True, [0, 4, 6]), (1, False, [1, 2, 3, 4, 5, 6])],
)
def test_evaluations_are_due_as_configured_and_after_the_last_step(
    every: int, before_train: bool, expected: list[int]
) -> None:
    config = EvalConfig(every=every, before_train=before_train)
    assert [step for step in range(7) if is_due(config, step=step, last_step=6)] == expected


def test_an_evaluation_measures_accuracy_reward_and_length() -> None:
    measured = measure([group([1.0, 0.0], [3, 5]), group([1.0, 1.0], [1, 7], truncated=[False, True])])
    assert (measured["accuracy"], measured["reward"], measured["length_mean"]) == (0.75, 0.75, 4.0)
    assert measured["truncated_fraction"] == 0.25
    assert measured["prompts"] == 2
    assert measured["accuracy_stderr"] == pytest.approx(0.25)  # of the prompts' accuracies 0.5 and 1
    assert "accuracy_stderr" not in measure([group([1.0, 0.0], [3, 5])])  # of one prompt


def test_mode_eval_ends_when_a_completion_is_lost_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(PlacementKind.colocate, timeout_s=5.0, stall_timeout_s=5.0, start_timeout_s=5.0, mode=Mode.eval)
    made.weight_sync.timeout_s = 5.0
    world = World(made, tmp_path, lambda prompt_id: math.inf if prompt_id == "eval/1" else 1.0, eval_rows=4)

    @asynccontextmanager
    async def workers(*_: object, weights: object) -> AsyncIterator[SimpleNamespace]:
        parts = world.context()
        yield SimpleNamespace(
            start_engines=partial(asyncio.sleep, 0),
            pool=parts.pool,
            supervisor=parts.supervisor,
            rollouter=parts.rollouter,
            inputs=SimpleNamespace(prompts=SimpleNamespace(evals=parts.evals)),
        )

    monkeypatch.setattr(app.mode.eval, "start_rollout_workers", workers)
    monkeypatch.setattr(asyncio, "run", run_virtual)
    with pytest.raises(RunError, match=r"no progress for 960 s: 1 groups in flight \(eval/1 on engine [01]\)"):
        app.mode.eval.run(made, tmp_path, RunInputs(made, CheckStage.start))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
