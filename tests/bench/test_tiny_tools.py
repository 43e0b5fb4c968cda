"""`experiment=tiny_tools` learns to ask the calculator, in both placements."""

from collections.abc import Callable

import pytest

from tests.runs import Run


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
def test_the_tiny_model_learns_to_ask_and_to_copy(placement: str, seed: int, start: Callable[..., Run]) -> None:
    run = start("experiment=tiny_tools", f"placement={placement}", f"seed={seed}")
    assert run.wait(1100) == 0, run.text
    assert run.gone_within(15), run.processes()

    steps = [line for line in run.metrics() if "time/step" in line]
    asked = [line["environment/tool_calls"] for line in steps]
    assert len(steps) == 60
    assert asked[0] < 0.3
    assert sum(asked[-5:]) / 5 > 0.95

    summary = run.summary()
    assert summary["eval/accuracy_first"] == 0.0
    assert summary["eval/accuracy_last"] > 0.95
    print(f"calls {asked[0]:.1%} → {asked[-1]:.1%}, accuracy 0 → {summary['eval/accuracy_last']:.1%}")

    if placement == "colocate":  # on-policy: what is trained on is what was sampled, over all turns
        assert max(line["mismatch/abs_difference"] for line in steps) < 1e-4
    assert max(line["staleness/max"] for line in steps) <= (0 if placement == "colocate" else 2)
