"""The four signatures of a custom reward, what it sees of a row, and what it can return."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.algorithm.metrics import group_metrics
from app.types import Group
from tests.refusals import refused
from tests.reward.scorers import WriteReward, failed, running_scorer, score, trajectory


def test_a_reward_sees_the_question_and_every_column_of_the_row(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "def rubric(trajectories):\n"
        "    return [one.prompt.row['points'][one.text] + len(one.prompt.question) for one in trajectories]\n"
    )
    with running_scorer(_target_=f"{module}.rubric") as scorer:
        assert score(scorer, [trajectory(text, points={"a": 1, "b": 2.5}) for text in "ab"]) == [12, 13.5]


def test_keywords_are_lists_of_texts_and_of_every_column(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "def judged(prompts, completions, tests, bonus, **columns):\n"
        "    assert prompts == ['what is it?'] * 2\n"
        "    assert sorted(columns) == ['answer', 'completion_ids', 'level']\n"
        "    assert columns['answer'] == ['42', '42'] and columns['completion_ids'] == [[0] * 8] * 2\n"
        "    assert columns['level'] == ['hard', 'hard']\n"
        "    return [bonus + (text in each) for text, each in zip(completions, tests)]\n"
    )
    batch = [trajectory(text, tests=["x", "y"], level="hard") for text in "xz"]
    with running_scorer(_target_=f"{module}.judged", args={"bonus": 0.5}) as scorer:
        assert score(scorer, batch) == [1.5, 0.5]
        assert failed(scorer) == {}


def test_a_column_named_answer_comes_before_the_reference_answer(custom_reward: WriteReward) -> None:
    module = custom_reward("def same(completions, answer):\n    return [float(answer == ['#### 7', '#### 7'])] * 2\n")
    row = {"answer": "#### 7"}
    bare = trajectory("7", answer="7")
    batch = [replace(bare, prompt=replace(bare.prompt, row=row))] * 2
    with running_scorer(_target_=f"{module}.same") as scorer:
        assert score(scorer, batch) == [1.0, 1.0]


def test_a_column_that_rows_lack_is_named(custom_reward: WriteReward) -> None:
    module = custom_reward("def needy(completions, solution, rubric):\n    return [1.0]\n")
    warned: list[str] = []
    with running_scorer(_target_=f"{module}.needy", max_failed_fraction=1, warned=warned) as scorer:
        assert score(scorer, [trajectory("a", level=3)]) == [0]
        assert failed(scorer) == {"value": 1}
    expected = "it takes solution, rubric; there are answer, level, prompts, completions, completion_ids."
    assert expected in warned[0]


VERL_ROW: dict[str, Any] = {"data_source": "openai/gsm8k", "extra_info": {"index": 7}}


def test_a_reward_written_for_verl_gets_its_four_arguments(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):\n"
        "    assert (data_source, ground_truth, extra_info['index']) == ('openai/gsm8k', '42', 7)\n"
        "    return {'score': scale * (ground_truth in solution_str), 'length': len(solution_str), 'pred': 'text'}\n"
    )
    batch = [trajectory(text, **VERL_ROW) for text in ("so 42", "7")]
    with running_scorer(_target_=f"{module}.compute_score", args={"scale": 2}) as scorer:
        scored = scorer.scored(batch)
        assert failed(scorer) == {}
    assert [one.reward for one in scored] == [2, 0]
    assert scored[0].reward_components == {"compute_score": 2, "compute_score/length": 5}


def test_a_reward_for_verl_may_take_fewer_arguments_and_rows_may_lack_the_columns(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "async def score(solution_str, extra_info, **others):\n"
        "    assert extra_info is None and sorted(others) == ['data_source', 'ground_truth']\n"
        "    return len(solution_str)\n"
    )
    with running_scorer(_target_=f"{module}.score") as scorer:
        assert score(scorer, [trajectory("abc")]) == [3]


def test_another_signature_is_refused_with_the_accepted_ones(custom_reward: WriteReward) -> None:
    module = custom_reward("def score(text, reference):\n    return 1.0\n")
    signatures = ("(text, reference)", "(trajectory)", "(data_source, solution_str, ground_truth, extra_info)")
    with refused("reward._target_", f"{module}.score", *signatures), running_scorer(_target_=f"{module}.score"):
        pass


def test_none_leaves_a_component_out_of_the_sum_and_of_its_mean(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "def code(completions, kind):\n    return [1.0 if each == 'code' else None for each in kind]\n"
        "def brief(trajectory):\n    return 0.5\n"
    )
    components = {name: {"_target_": f"{module}.{name}"} for name in ("code", "brief")}
    batch = [trajectory("a", kind="code"), trajectory("b", kind="prose")]
    with running_scorer(components=components) as scorer:
        scored = scorer.scored(batch)
        assert failed(scorer) == {}
    assert [one.reward for one in scored] == [1.5, 0.5]
    assert [one.reward_components for one in scored] == [{"code": 1.0, "brief": 0.5}, {"brief": 0.5}]
    means = group_metrics([Group(scored[0].prompt, tuple(scored))])
    assert (means["reward/code"], means["reward/brief"]) == (1.0, 0.5)


def test_a_trajectory_to_which_no_component_applies_has_failed(custom_reward: WriteReward) -> None:
    module = custom_reward("def never(trajectories):\n    return [None, 1.0]\n")
    with running_scorer(_target_=f"{module}.never", max_failed_fraction=1) as scorer:
        assert score(scorer, [trajectory("a"), trajectory("b")]) == [0, 1.0]
        assert failed(scorer) == {"value": 1}


@pytest.mark.parametrize("result", ["{'reward': 1.0}", "{'score': 'high'}", "{'score': float('nan')}"])
def test_a_mapping_without_a_number_as_score_is_a_failure(custom_reward: WriteReward, result: str) -> None:
    module = custom_reward(f"def odd(trajectory):\n    return {result}\n")
    with running_scorer(_target_=f"{module}.odd", max_failed_fraction=1) as scorer:
        assert score(scorer, [trajectory("a")]) == [0]
        assert failed(scorer) == {"value": 1}


def test_a_reward_of_one_trajectory_fails_alone_without_a_second_call(
    custom_reward: WriteReward, tmp_path: Path
) -> None:
    module = custom_reward(
        "def one(trajectory):\n"
        "    if trajectory.text == 'bad':\n"
        "        raise ValueError('unreadable')\n"
        "    return len(trajectory.text)\n"
    )
    log = tmp_path / "reward.log"
    with running_scorer(_target_=f"{module}.one", log=log) as scorer:
        assert score(scorer, [trajectory(text) for text in ("a", "bad", "abc")]) == [1, 0, 3]
        assert failed(scorer) == {"exception": 1}
        assert scorer.metrics["reward/retried"] == 0
    assert "ValueError: unreadable" in log.read_text()
    assert "one failed on set/0@0, 3 trajectories: exception: ValueError: unreadable at " in log.read_text()


def test_an_async_reward_of_one_trajectory_scores_the_group_concurrently(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "import asyncio\n"
        "arrived = 0\n"
        "class Judge:\n"
        "    def __init__(self, size):\n"
        "        self.size, self.arrived, self.all = size, 0, asyncio.Event()\n"
        "    async def __call__(self, trajectory):\n"
        "        self.arrived += 1\n"
        "        if self.arrived == self.size:\n"
        "            self.all.set()\n"
        "        await self.all.wait()\n"  # a sequential caller would wait for ever
        "        if trajectory.text == 'bad':\n"
        "            raise ConnectionError('refused')\n"
        "        return 0.5\n"
    )
    with running_scorer(_target_=f"{module}.Judge", args={"size": 8}, timeout_s=60.0) as scorer:
        batch = [trajectory("bad" if index == 3 else "fine") for index in range(8)]
        assert score(scorer, batch) == [0.5, 0.5, 0.5, 0, 0.5, 0.5, 0.5, 0.5]
        assert failed(scorer) == {"exception": 1}


@pytest.mark.parametrize("sync", ["def", "async def"])
def test_columns_can_be_scored_by_sync_and_async_functions(custom_reward: WriteReward, sync: str) -> None:
    module = custom_reward(f"{sync} lengths(completions, **_):\n    return [len(each) for each in completions]\n")
    with running_scorer(_target_=f"{module}.lengths") as scorer:
        assert score(scorer, [trajectory("a"), trajectory("ab")]) == [1, 2]


def test_own_and_built_in_components_are_summed_with_weights(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "def brief(trajectories, limit):\n    return [float(len(one.text) <= limit) for one in trajectories]\n"
        "async def polite(trajectory):\n    return float('please' in trajectory.text)\n"
    )
    components = {
        "math": {"weight": 1},
        "format": 0.25,
        "brief": {"_target_": f"{module}.brief", "args": {"limit": 12}, "weight": 0.5},
        "polite": {"_target_": f"{module}.polite", "weight": 0},
    }
    batch = [trajectory("\\boxed{42}"), trajectory("please, \\boxed{42}"), trajectory("7")]
    with running_scorer(components=components, workers=2) as scorer:
        scored = scorer.scored(batch)
        assert failed(scorer) == {}
    assert [one.reward for one in scored] == [1.75, 1.25, 0.5]
    assert scored[1].reward_components == {"math": 1, "format": 1, "brief": 0, "polite": 1}
    assert list(scored[1].reward_components) == ["math", "format", "brief", "polite"]


def test_a_component_that_hangs_does_not_keep_the_others_from_their_values(custom_reward: WriteReward) -> None:
    module = custom_reward("import time\ndef stuck(trajectories):\n    time.sleep(1000)\n")
    components = {"math": 1.0, "stuck": {"_target_": f"{module}.stuck"}}
    with running_scorer(components=components, timeout_s=1.0) as scorer:
        (scored,) = scorer.scored([trajectory("\\boxed{42}")])
    assert scored.reward == 0
    assert scored.reward_components == {"math": 1, "stuck": 0}
