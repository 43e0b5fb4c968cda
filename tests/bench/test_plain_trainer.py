"""The baselines of the trainer benchmark have the gradients of one trajectory at a time."""

from pathlib import Path

import pytest

from tests.bench.plain_trainer import PlainTrainer
from tests.model.support import relative, save_qwen3
from tests.trainer import plain
from tests.trainer.support import scored_groups


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_both_loops_have_the_gradient_of_one_trajectory_at_a_time(naive: bool, path: Path) -> None:
    groups = scored_groups(4, shortest=1)
    reference = plain.transformers_model(path)
    for scored in groups:
        for trajectory, advantage in zip(scored.group.trajectories, scored.advantages, strict=True):
            logprobs, _ = plain.token_logprobs(reference, trajectory, temperature=1.0)
            (-float(advantage) * logprobs.mean() / 16).backward()

    baseline = PlainTrainer(path, budget=60, naive=naive)
    baseline.accumulate(groups)

    for (name, ours), theirs in zip(baseline.model.named_parameters(), reference.parameters(), strict=True):
        assert relative(ours.grad.double(), theirs.grad) < 1e-4, name
