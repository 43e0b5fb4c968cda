"""What tells runs apart."""

import doctest
from pathlib import Path
from typing import Any

import pytest

from app.tracking.report import comparison, evaluation
from app.tracking.report.comparison import Spread, compare, percent
from app.tracking.report.data import RunData


def a_run(name: str, config: dict[str, Any], *overrides: str, **summary: Any) -> RunData:
    return RunData(Path(name), name, name, summary, [], [], {}, config, list(overrides), [], [])


def test_only_what_varies_is_shown_and_the_seed_last() -> None:
    runs = [
        a_run(
            f"{lr}{seed}", {"seed": seed, "trainer.lr": lr, "steps": 5}, f"trainer.lr={lr}", f"seed={seed}", "steps=5"
        )
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    made = compare(runs)
    assert made.keys == ["trainer.lr", "seed"]
    assert made.labels == ["lr", "seed"]
    assert made.names == ["lr=0.1, seed=0", "lr=0.1, seed=1", "lr=0.2, seed=0", "lr=0.2, seed=1"]


def test_what_a_preset_brings_along_is_not_shown_beside_its_name() -> None:
    presets = {"grpo": 0.2, "dapo": 0.28}
    runs = [
        a_run(name, {"algorithm.name": name, "algorithm.clip_high": clip, "algorithm.a": clip}, f"algorithm={name}")
        for name, clip in presets.items()
    ]
    assert compare(runs).names == ["grpo", "dapo"]
    assert compare(runs).keys == ["algorithm.name"]


def test_all_that_was_given_and_varies_is_shown() -> None:
    runs = [
        a_run(str(size), {"trainer.lr": size / 10, "algorithm.group_size": size, "algorithm.hidden": size}, *given)
        for size, given in (
            (4, ["trainer.lr=0.4", "algorithm.group_size=4"]),
            (8, ["trainer.lr=0.8", "algorithm.group_size=8"]),
        )
    ]
    assert compare(runs).keys == ["algorithm.group_size", "trainer.lr"]


def test_where_records_go_and_servers_listen_is_no_difference() -> None:
    runs = [
        a_run(f"run{seed}", {"seed": seed, "tracking.run_name": f"n{seed}", "rollout.port": seed}, status="finished")
        for seed in (1, 2)
    ]
    made = compare(runs)
    assert made.keys == ["seed"]
    assert [len(group.runs) for group in made.seed_groups()] == [2]


def test_the_checkpoint_tells_evaluations_apart_and_not_training_runs() -> None:
    configs = [{"seed": 0, "resume": "run/step_1"}, {"seed": 0, "resume": "run/step_2"}]
    assert compare([a_run(config["resume"], {**config, "mode": "train"}) for config in configs]).keys == []
    assert compare([a_run(config["resume"], {**config, "mode": "eval"}) for config in configs]).names == [
        "resume=run/step_1",
        "resume=run/step_2",
    ]


def test_equal_runs_and_runs_without_a_configuration_have_their_folders_names() -> None:
    made = compare([a_run("a/one", {"seed": 1}), a_run("a/two", {"seed": 1}), a_run("a/old", {})])
    assert (made.keys, made.names) == ([], ["one", "two", "old"])
    made = compare([a_run("one", {"seed": 1}), a_run("two", {"seed": 1}), a_run("three", {"seed": 2})])
    assert made.names == ["seed=1 (one)", "seed=1 (two)", "seed=2"]


def test_keys_with_the_same_last_word_are_written_out() -> None:
    runs = [
        a_run(str(value), {"eval.temperature": value, "rollout.temperature": 1 - value, "seed": value}, *given)
        for value, given in ((0, ["eval.temperature=0", "rollout.temperature=1"]), (1, []))
    ]
    assert compare(runs).labels == ["eval.temperature", "rollout.temperature", "seed"]


def test_means_cover_the_finished_runs_of_a_setting() -> None:
    runs = [
        a_run(f"{lr}{seed}", {"seed": seed, "lr": lr}, status=status, **{"eval/accuracy_last": accuracy})
        for lr, seed, status, accuracy in (
            (1, 0, "finished", 0.6),
            (1, 1, "finished", 0.8),
            (1, 2, "failed", 0.0),
            (2, 0, "finished", 0.5),
        )
    ]
    first, second = compare(runs).seed_groups()
    assert (first.values, len(first.runs)) == (["1"], 2)
    spread = first.spread("eval/accuracy_last")
    assert spread is not None
    assert (spread.mean, spread.deviation) == (pytest.approx(0.7), pytest.approx(0.02**0.5))
    assert second.spread("eval/accuracy_last") == Spread(0.5, None)
    assert first.cells == ["1", "2", "—", "70.0% ± 14.1%", "—", "—"]
    assert second.cells == ["2", "1", "—", "50.0%", "—", "—"]
    assert first.spread("total/seconds") is None
    assert percent(0.123) == "12.3%"


def test_one_seed_each_has_no_means() -> None:
    runs = [a_run(str(seed), {"seed": seed, "lr": seed}, status="finished") for seed in (0, 1)]
    assert compare(runs).seed_groups() == []


@pytest.mark.parametrize("module", [comparison, evaluation])
def test_the_examples_in_the_docstrings_hold(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
