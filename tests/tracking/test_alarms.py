import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.config import RunConfig
from app.config.compose import setting_names
from app.tracking.recorder import RunFolderRecorder
from app.tracking.report.checks import PHASES
from app.tracking.rules import RULES, Alarms


def run(steps: Iterable[Mapping[str, float]], **settings: Any) -> list[tuple[int, str]]:
    """Return (step, name) of every alarm that these metrics raise."""
    alarms = Alarms(**settings)
    return [(step, name) for step, metrics in enumerate(steps, 1) for name in alarms.check(step, metrics)]


HEALTHY = {
    "reward/zero_std_fraction": 0.3,
    "reward/accuracy": 0.5,
    "reward/failed_fraction": 0.0,
    "mismatch/kl": 1e-7,
    "kl/old": 1e-4,
    "kl/reference": 1e-4,
    "entropy": 1.0,
    "completion/truncated_fraction": 0.1,
    "throughput/completion_tokens_per_second": 1000.0,
    "staleness/mean": 1.0,
    "grad_norm/max": 0.5,
    "updates/skipped": 0.0,
    "recovery/engine_restarts": 0.0,
}


def healthy(count: int) -> list[dict[str, float]]:
    return [dict(HEALTHY) for _ in range(count)]


def test_a_healthy_run_and_a_run_without_metrics_raise_nothing() -> None:
    learning = [
        {**HEALTHY, "entropy": 1.0 - 0.019 * step, "reward/accuracy": min(0.95, 0.3 + step / 40)} for step in range(50)
    ]
    assert run(learning, max_staleness=2) == []
    assert run([{} for _ in range(50)], max_staleness=2) == []


@pytest.mark.parametrize(
    ("name", "changes", "needed"),
    [
        ("no reward variance", {"reward/zero_std_fraction": 1.0}, 3),
        ("mismatch", {"mismatch/kl": 0.01}, 1),
        ("drift", {"mismatch/kl": 0.5, "staleness/max": 1.0}, 1),
        ("KL to the old policy", {"kl/old": 0.5}, 1),
        ("KL to the reference", {"kl/reference": 0.5}, 1),
        ("entropy collapse", {"entropy": 0.04}, 1),
        ("truncated completions", {"completion/truncated_fraction": 1.0}, 2),
        ("throughput", {"throughput/completion_tokens_per_second": 400.0}, 3),
        ("staleness", {"staleness/mean": 2.0}, 5),
        ("staleness", {"staleness/max": 3.0}, 1),
        ("engine restarts", {"recovery/engine_restarts": 1.0}, 1),
        ("reward failures", {"reward/failed_fraction": 0.1}, 1),
        ("failed episodes", {"environment/failed_fraction": 0.06}, 1),
        ("tool calls", {"environment/tool_failed_fraction": 0.97}, 3),
        ("waiting for environments", {"environment/wait_fraction": 0.9}, 3),
        ("gradient not finite", {"updates/skipped": 1.0}, 1),
    ],
)
def test_each_problem_raises_its_alarm_once_after_its_number_of_steps(
    name: str, changes: dict[str, float], needed: int
) -> None:
    steps = healthy(15) + [{**HEALTHY, **changes} for _ in range(8)]
    assert run(steps, max_staleness=2) == [(15 + needed, name)]


def test_an_alarm_is_raised_again_only_after_its_problem_ended_and_a_growing_number_of_quiet_steps() -> None:
    problem = {**HEALTHY, "mismatch/kl": 0.5}
    flicker = [problem, HEALTHY] * 60
    assert [step for step, _ in run(healthy(10) + flicker)] == [11, 31, 111]


def test_low_entropy_is_no_alarm_while_most_answers_are_correct() -> None:
    assert run([{**HEALTHY, "entropy": 1.0 if step < 6 else 0.01, "reward/accuracy": 0.95} for step in range(20)]) == []


FLAT = {"reward/zero_std_fraction": 1.0, "reward/all_correct_fraction": 0.375, "reward/all_wrong_fraction": 0.625}


def texts(steps: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Return the text of every alarm that these metrics raise, by its name."""
    alarms = Alarms()
    return {name: text for step, each in enumerate(steps, 1) for name, text in alarms.check(step, each).items()}


def test_the_alarm_counts_the_groups_that_are_all_right_and_all_wrong() -> None:
    text = texts([{**HEALTHY, **FLAT, "reward/accuracy": 0.375}] * 3)["no reward variance"]
    assert re.findall(r"(\d+)% (?:of the groups are )?(all \w+|mixed)", text) == [
        ("38", "all right"),
        ("62", "all wrong"),
        ("0", "mixed"),
    ]


def test_copies_of_one_completion_are_an_alarm_that_names_the_temperature_unless_they_are_right() -> None:
    copies = {**HEALTHY, **FLAT, "completion/identical_fraction": 1.0}
    assert "rollout.temperature" in texts([copies] * 3)["identical completions"]
    right = {**HEALTHY, "completion/identical_fraction": 0.9, "reward/all_correct_fraction": 0.8}
    assert "identical completions" not in texts([right] * 12)


def test_equal_rewards_are_expected_once_a_run_has_learned_and_not_before() -> None:
    solved = {**HEALTHY, "reward/zero_std_fraction": 1.0, "reward/accuracy": 1.0}
    assert run([solved] * 12) == [(3, "no reward variance")]
    assert run([*healthy(5), *[solved] * 12]) == []


def test_most_groups_without_variance_for_long_are_an_alarm() -> None:
    assert run([{**HEALTHY, "reward/zero_std_fraction": 0.8}] * 12) == [(10, "no reward variance")]


def test_an_accuracy_of_0_with_rewards_that_differ_is_an_alarm() -> None:
    """A reward of the wrong sign, or of another scale; where all are equal another alarm says so."""
    zero = {**HEALTHY, "reward/accuracy": 0.0}
    assert run([zero] * 12) == [(10, "accuracy of 0")]
    assert run([*healthy(1), *[zero] * 9]) == []
    flat = {**zero, "reward/zero_std_fraction": 1.0}
    assert [name for _, name in run([flat] * 12)] == ["no reward variance"]


@pytest.mark.parametrize(
    ("accuracy", "slope", "stderr", "raised"),
    [
        (0.1, 0.05, 0.02, [(20, "reward against accuracy")]),
        (0.1, 0.0, 0.02, []),  # the reward does not rise
        (0.28, 0.05, 0.02, []),  # within the noise
        (0.1, 0.05, 0.1, []),  # of few rows
        (0.6, 0.05, 0.02, []),
    ],
)
def test_a_reward_that_rises_while_the_held_out_accuracy_falls_is_an_alarm(
    accuracy: float, slope: float, stderr: float, raised: list[tuple[int, str]]
) -> None:
    """The evaluation of a step is checked after the step."""
    alarms = Alarms()
    found = list(alarms.check(0, {"eval/accuracy": 0.3, "eval/accuracy_stderr": stderr}))
    assert found == []
    for step in range(1, 21):
        assert list(alarms.check(step, {**HEALTHY, "reward/mean": slope * step + 0.01 * (step % 2)})) == []
    evaluation = alarms.check(20, {"eval/accuracy": accuracy, "eval/accuracy_stderr": stderr})
    assert [(20, name) for name in evaluation] == raised


def test_weights_that_no_update_moves_are_an_alarm_and_those_at_the_end_of_a_decay_are_not() -> None:
    still = {**HEALTHY, "updates/relative_change": 1e-8, "grad_norm": 0.5}
    assert run([still] * 9) == [(5, "unmoved weights")]
    decayed = [{**still, "updates/relative_change": 5e-5 * 0.8**step} for step in range(80)]
    assert run(decayed) == []
    assert run([{**still, "updates/relative_change": 0.0, "grad_norm": 0.0}] * 9) == []  # equal rewards are the reason


def test_all_settings_named_in_advice_exist() -> None:
    advice = " ".join([*(rule.advice for rule in RULES.values()), *(remedy for _, remedy in PHASES.values())])
    files = {"timeline.json", "ui.perfetto.dev", "reward.log", "environment.log"}
    named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", advice)) - files
    assert len(named) > 15
    assert named <= set(setting_names())


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_norm/max": 250.0},  # of the report only, because a large norm may be clipped for good
        {"environment/sequences_mean": 9.0},  # an agent may hold several conversations on purpose
        {"environment/wait_fraction": 0.95, "idle/rollout": 0.1},  # engines play other episodes meanwhile
        {"staleness/mean": 1.0, "staleness/max": 1.0},  # at a bound of 1 it means that phases overlap
        {"mismatch/kl": 0.09, "staleness/max": 1.0},  # an older policy's log-probabilities are expected to differ
    ],
)
def test_what_may_be_meant_raises_no_alarm(changes: dict[str, float]) -> None:
    assert run([*healthy(15), *[{**HEALTHY, **changes}] * 10], max_staleness=1) == []


def test_a_resumed_run_remembers_its_steps(tmp_path: Path) -> None:
    """The entropy of its beginning is compared with, and an alarm that was set aside is raised again."""
    collapsed = {**HEALTHY, "entropy": 0.01}
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        for step, metrics in enumerate([*healthy(12), HEALTHY], start=1):
            recorder.log(step, metrics)
    for _ in range(2):
        with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
            recorder.resume(12)
            for step in range(13, 23):
                recorder.log(step, collapsed)
        texts = [json.loads(line)["text"] for line in (tmp_path / "logs" / "warnings.jsonl").read_text().splitlines()]
        assert len([text for text in texts if "entropy" in text.casefold()]) == 1, texts
