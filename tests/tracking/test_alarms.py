import math

import pytest

from app.tracking.alarms import Alarms


def run(steps, **settings):
    """(step, name) of every alarm that these metrics raise."""
    alarms = Alarms(**settings)
    return [(alarm.step, alarm.name) for step, metrics in enumerate(steps, 1) for alarm in alarms.check(step, metrics)]


HEALTHY = {
    "reward/zero_std_fraction": 0.3,
    "reward/accuracy": 0.5,
    "reward/failed_fraction": 0.0,
    "mismatch/kl": 1e-7,
    "kl/old": 1e-4,
    "entropy": 1.0,
    "completion/truncated_fraction": 0.1,
    "throughput/completion_tokens_per_second": 1000.0,
    "staleness/mean": 1.0,
    "grad_norm": 0.5,
    "recovery/engine_restarts": 0.0,
}


def healthy(count):
    return [dict(HEALTHY) for _ in range(count)]


def test_a_healthy_run_and_a_run_without_numbers_raise_nothing():
    learning = [
        {**HEALTHY, "entropy": 1.0 - 0.019 * step, "reward/accuracy": min(0.95, 0.3 + step / 40)} for step in range(50)
    ]
    assert run(learning, max_staleness=2) == []
    assert run([{} for _ in range(50)], max_staleness=2) == []


@pytest.mark.parametrize(
    ("name", "changes", "needed"),
    [
        ("groups without spread", {"reward/zero_std_fraction": 1.0}, 3),
        ("mismatch", {"mismatch/kl": 0.01}, 1),
        ("drift", {"mismatch/kl": 0.5, "staleness/max": 1.0}, 1),
        ("KL", {"kl/old": 0.5}, 1),
        ("entropy collapse", {"entropy": 0.04}, 1),
        ("all completions truncated", {"completion/truncated_fraction": 1.0}, 2),
        ("throughput halved", {"throughput/completion_tokens_per_second": 400.0}, 3),
        ("staleness at its bound", {"staleness/mean": 2.0}, 5),
        ("engine restarts", {"recovery/engine_restarts": 1.0}, 1),
        ("rewards failing", {"reward/failed_fraction": 0.1}, 1),
        ("gradients not finite", {"grad_norm": math.nan}, 1),
    ],
)
def test_each_trouble_raises_its_alarm_once_when_it_has_lasted(name, changes, needed):
    steps = healthy(15) + [{**HEALTHY, **changes} for _ in range(8)]
    assert run(steps, max_staleness=2) == [(15 + needed, name)]


def test_an_alarm_comes_back_only_after_it_was_over_and_some_quiet_steps():
    trouble = {**HEALTHY, "mismatch/kl": 0.5}
    flicker = [trouble, HEALTHY] * 60
    assert [step for step, _ in run(healthy(10) + flicker)] == [11, 31, 111]


def test_an_older_policy_that_sampled_is_no_mismatch():
    """What would be one on-policy: the engine had another policy, and is right to differ."""
    assert run([*healthy(10), {**HEALTHY, "mismatch/kl": 0.09, "staleness/max": 1.0}], max_staleness=2) == []


def test_low_entropy_is_no_alarm_where_the_answers_are_right():
    assert run([{**HEALTHY, "entropy": 1.0 if step < 6 else 0.01, "reward/accuracy": 0.95} for step in range(20)]) == []


def test_the_sentence_says_what_was_seen_and_what_to_try():
    alarms = Alarms()
    for step in range(1, 4):
        raised = alarms.check(step, {"reward/zero_std_fraction": 1.0, "reward/accuracy": 0.0})
    assert raised[0].what == "In 100% of the groups all completions earn the same (all wrong): no gradient."
    assert "reward's parsing" in raised[0].advice
    assert raised[0].text.startswith("step 3: In 100%")
