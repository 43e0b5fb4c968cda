"""Adapters of rank 8 reach the accuracy of full fine-tuning, in both placements."""

from collections.abc import Callable

import pytest

from tests.runs import Run

WITHIN = 0.02  # of full fine-tuning's greedy accuracy
EVALUATED = "data.arithmetic.eval_problems=600"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
def test_adapters_learn_what_all_weights_learn(placement: str, seed: int, start: Callable[..., Run]) -> None:
    accuracy: dict[str, float] = {}
    for model in ("tiny", "tiny_lora"):
        run = start(f"model={model}", f"placement={placement}", f"seed={seed}", "steps=60", EVALUATED)
        assert run.wait(400) == 0, run.text
        summary = run.summary()
        assert summary["eval/accuracy_first"] < 0.5
        accuracy[model] = summary["eval/accuracy_last"]
        run.folder.rename(run.folder.with_name(model))
    print(accuracy)
    assert accuracy["tiny_lora"] >= accuracy["tiny"] - WITHIN
