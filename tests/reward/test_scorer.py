import math
import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from app.config import RunConfig
from app.config.reward import RewardConfig
from app.reward import component
from tests.refusals import refused
from tests.reward.scorers import TOWER, WriteReward, failed, pids, running_scorer, score, trajectory
from tests.waiting import until

# weighted sums


def test_the_reward_is_the_weighted_sum_and_components_are_reported_unweighted() -> None:
    with running_scorer(components={"math": 1.0, "format": 0.25, "exact": -0.5}) as scorer:
        boxed, plain, wrong = scorer.scored([trajectory("\\boxed{42}"), trajectory("42"), trajectory("\\boxed{1}")])
    assert boxed.reward == 1.25
    assert boxed.reward_components == {"math": 1.0, "format": 1.0, "exact": 0.0}
    assert plain.reward == 0.5
    assert plain.reward_components == {"math": 1.0, "format": 0.0, "exact": 1.0}
    assert wrong.reward == 0.25


def test_a_component_of_weight_zero_is_only_measured() -> None:
    with running_scorer(components={"exact": 1.0, "format": 0.0}) as scorer:
        (scored,) = scorer.scored([trajectory("\\boxed{42}")])
    assert scored.reward == 0.0
    assert scored.reward_components == {"exact": 0.0, "format": 1.0}


def test_no_trajectories_give_no_rewards() -> None:
    with running_scorer(components={"math": 1.0}) as scorer:
        assert score(scorer, []) == []


def test_exact_starts_no_process_and_no_thread() -> None:
    batch = [trajectory("42", prompt_id=f"set/{index // 8}@0") for index in range(128)]
    children, threads = psutil.Process().children(), threading.enumerate()
    with running_scorer(components={"exact": 1.0}) as scorer:
        assert score(scorer, batch) == [1.0] * 128
        assert psutil.Process().children() == children
        assert threading.enumerate() == threads
        assert scorer.pools == []


# custom rewards


def test_a_function_gets_the_trajectories_of_one_prompt_and_its_arguments(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "def ranked(trajectories, scale=1.0):\n"
        "    assert len({one.prompt.id for one in trajectories}) == 1\n"
        "    return [scale * index + len(one.completion.token_ids) for index, one in enumerate(trajectories)]\n"
    )
    batch = [trajectory("a", prompt_id="set/1@0")] * 3 + [trajectory("b", prompt_id="set/2@0")] * 2
    with running_scorer(_target_=f"{module}.ranked", args={"scale": 0.5}) as scorer:
        scored = scorer.scored(batch)
    assert [one.reward for one in scored] == [8, 8.5, 9, 8, 8.5]
    assert scored[1].reward_components == {"ranked": 8.5}


def test_arguments_arrive_as_they_are(custom_reward: WriteReward) -> None:
    module = custom_reward("def weighted(trajectories, weights):\n    return [weights[2][0]] * len(trajectories)\n")
    with running_scorer(_target_=f"{module}.weighted", args={"weights": {2: (0.5, 1.0)}}) as scorer:
        assert score(scorer, [trajectory("a")]) == [0.5]


def test_a_class_is_instantiated_once_and_keeps_its_state(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "class Counter:\n"
        "    def __init__(self, start):\n"
        "        self.calls = start\n"
        "    def __call__(self, trajectories):\n"
        "        self.calls += 1\n"
        "        return [self.calls] * len(trajectories)\n"
    )
    with running_scorer(_target_=f"{module}.Counter", args={"start": 10}) as scorer:
        assert score(scorer, [trajectory("a")] * 2) == [11, 11]
        assert score(scorer, [trajectory("a")]) == [12]


def test_the_trajectories_of_an_async_reward_are_awaited_together_on_one_loop(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "import asyncio\n"
        "loops = set()\n"
        "running = most = 0\n"
        "async def one(trajectory):\n"
        "    global running, most\n"
        "    running += 1\n"
        "    most = max(most, running)\n"
        "    await asyncio.sleep(0.01)\n"
        "    running -= 1\n"
        "async def judge(trajectories):\n"
        "    loops.add(id(asyncio.get_running_loop()))\n"
        "    assert len(loops) == 1\n"
        "    await asyncio.gather(*(one(trajectory) for trajectory in trajectories))\n"
        "    return [most] * len(trajectories)\n"
    )
    with running_scorer(_target_=f"{module}.judge") as scorer:
        assert score(scorer, [trajectory("a") for _ in range(8)]) == [8] * 8
        assert score(scorer, [trajectory("aa")]) == [8]  # the same process
        assert failed(scorer) == {}


def test_numpy_values_integers_and_booleans_are_numbers(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "import numpy as np\n"
        "def array(trajectories):\n"
        "    return np.arange(len(trajectories), dtype=np.float32)\n"
        "def mixed(trajectories):\n"
        "    return [True, 2, np.float64(0.5), np.int64(7)]\n"
    )
    with running_scorer(_target_=f"{module}.array") as scorer:
        assert score(scorer, [trajectory("a")] * 3) == [0, 1, 2]
    with running_scorer(_target_=f"{module}.mixed") as scorer:
        assert score(scorer, [trajectory("a")] * 4) == [1, 2, 0.5, 7]


def test_several_workers_score_at_the_same_time(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "import os, time\ndef slow(trajectories):\n    time.sleep(0.3)\n    return [os.getpid()] * len(trajectories)\n"
    )
    batch = [trajectory("a", prompt_id=f"set/{index}@0") for index in range(4)]
    with running_scorer(_target_=f"{module}.slow", workers=4) as scorer:
        assert len(set(score(scorer, batch))) == 4


def test_printing_goes_to_the_log(custom_reward: WriteReward, tmp_path: Path) -> None:
    module = custom_reward(
        "def chatty(trajectories):\n    print('hello', flush=True)\n    return [1] * len(trajectories)\n"
    )
    log = tmp_path / "logs" / "reward.log"  # the folder is created
    with running_scorer(_target_=f"{module}.chatty", log=log) as scorer:
        assert score(scorer, [trajectory("a")]) == [1]
    assert log.read_text() == "hello\n"


# rewards that fail


def test_only_the_offending_trajectory_of_a_call_fails_and_the_retries_are_counted(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "import os, time\n"
        "def touchy(trajectories):\n"
        "    for one in trajectories:\n"
        "        if one.text == 'raise':\n"
        "            raise RuntimeError('I do not like it')\n"
        "        if one.text == 'hang':\n"
        "            time.sleep(1000)\n"
        "        if one.text == 'die':\n"
        "            os._exit(3)\n"
        "    return [1.0] * len(trajectories)\n"
    )
    for text, kind in (("raise", "exception"), ("hang", "timeout"), ("die", "died")):
        with running_scorer(_target_=f"{module}.touchy", timeout_s=1.0) as scorer:
            assert score(scorer, [trajectory(one) for one in ("a", text, "b")]) == [1, 0, 1]
            assert failed(scorer) == {kind: 1}
            assert scorer.metrics["reward/retried"] == 3


def test_a_call_for_several_trajectories_has_the_sum_of_their_deadlines(
    custom_reward: WriteReward, tmp_path: Path
) -> None:
    module = custom_reward(
        "import time\n"
        "def slow(trajectories, calls):\n"
        "    with open(calls, 'a') as file:\n"
        "        file.write(f'{len(trajectories)} ')\n"
        "    time.sleep(1.5)\n"
        "    return [1.0] * len(trajectories)\n"
    )
    calls = tmp_path / "calls"
    with running_scorer(_target_=f"{module}.slow", args={"calls": str(calls)}, timeout_s=1.0) as scorer:
        assert score(scorer, [trajectory("a")] * 32) == [1.0] * 32
        assert failed(scorer) == {}
        assert scorer.metrics["reward/retried"] == 0
    assert calls.read_text() == "32 "


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[1.0, float('nan'), 0.5]", [1, 0, 0.5]),
        ("[1.0, float('inf'), 0.5]", [1, 0, 0.5]),
        ("[1.0, '1.0', 0.5]", [1, 0, 0.5]),
        ("[1.0, None, 0.5]", [1, 0, 0.5]),
        ("[1.0, [1.0], 0.5]", [1, 0, 0.5]),
        ("[1.0, 0.5]", [0, 0, 0]),
        ("[1.0] * 4", [0, 0, 0]),
        ("[]", [0, 0, 0]),
        ("'111'", [0, 0, 0]),
        ("1.0", [0, 0, 0]),
        ("None", [0, 0, 0]),
        ("{'a': 1, 'b': 1, 'c': 1}", [0, 0, 0]),
        ("(1.0 for _ in trajectories)", [0, 0, 0]),
    ],
)
def test_anything_but_one_finite_number_per_trajectory_is_counted_and_scores_zero(
    custom_reward: WriteReward, value: str, expected: list[float] | list[int]
) -> None:
    module = custom_reward(f"def odd(trajectories):\n    return {value}\n")
    with running_scorer(_target_=f"{module}.odd") as scorer:
        assert score(scorer, [trajectory("a")] * 3) == expected
        assert failed(scorer) == {"value": 3 - sum(map(bool, expected))}


def test_a_failed_component_makes_the_whole_reward_zero() -> None:
    with running_scorer(components={"math": 1.0, "format": 0.5}, timeout_s=0.5) as scorer:
        (scored,) = scorer.scored([trajectory(TOWER)])
    assert scored.reward == 0.0
    assert scored.reward_components == {"math": 0.0, "format": 1.0}


def test_a_pathological_answer_costs_at_most_the_limit_and_the_worker_is_replaced() -> None:
    with running_scorer(components={"math": 1.0}, timeout_s=1.0) as scorer:
        assert score(scorer, [trajectory("\\boxed{42}")]) == [1]
        (before,) = pids(scorer)
        begin = time.perf_counter()
        assert score(scorer, [trajectory(TOWER)]) == [0]
        assert time.perf_counter() - begin < 60
        assert pids(scorer) != [before]
        until(lambda: not os.path.exists(f"/proc/{before}"), 60.0)
        assert score(scorer, [trajectory("\\boxed{42}"), trajectory("9**9**9**9"), trajectory("42")]) == [1, 0, 1]
        assert failed(scorer) == {"timeout": 2}


@pytest.mark.parametrize("text", ["\\boxed{" * 500, "(" * 5000, "$" * 5000, "1," * 5000, "9" * 20000, "\\frac{" * 500])
def test_an_unreadable_answer_scores_zero_without_a_failure(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component, "BUILT_IN_TIMEOUT_S", 20.0)
    with running_scorer(components={"math": 1.0}, timeout_s=20.0) as scorer:
        assert score(scorer, [trajectory(text)]) == [0]
        assert failed(scorer) == {}


# configuration


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            "no_such_module.reward",
            "there is no module no_such_module (searched the working directory and PYTHONPATH)",
        ),
        ("os.no_such_package.reward", "module os has no no_such_package.reward"),
        ("{module}.missing", "module {module} has no missing"),
        ("{module}.NUMBER", "it is not a function or class"),
        (
            "{module}.no_arguments",
            "its parameters are (): write (trajectories) or ",
        ),
        (
            "{module}.Needy",
            "it cannot be constructed or called with {} (TypeError: Needy.__init__() missing 1 required",
        ),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_configuration_error(
    custom_reward: WriteReward, target: str, reason: str
) -> None:
    module = custom_reward(
        "NUMBER = 3\ndef no_arguments():\n    return []\nclass Needy:\n    def __init__(self, needed):\n        pass\n"
    )
    target, reason = target.replace("{module}", module), reason.replace("{module}", module)
    with refused("reward._target_", target, reason), running_scorer(_target_=target):
        pass


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library\n", "needs a module that is missing (No module named 'no_such_library')"),
        ("1 / 0\n", "cannot be imported (ZeroDivisionError: division by zero at "),
        ("def broken(:\n", "cannot be imported (SyntaxError: "),
        ("import os\nos._exit(1)\n", "of the reward reward could not start: the worker process died (exit code 1)"),
    ],
)
def test_a_module_that_fails_to_import_says_why(custom_reward: WriteReward, source: str, reason: str) -> None:
    module = custom_reward(source)
    with refused("reward._target_", f"{module}.reward", reason), running_scorer(_target_=f"{module}.reward"):
        pass


def test_invalid_settings_are_rejected() -> None:
    for config, setting in (
        (RewardConfig(), "reward.components={}"),
        (RewardConfig(components={"mth": 1.0}), "reward.components.mth=1.0"),
        (RewardConfig(components={"math": math.nan}), "reward.components.math=nan"),
        (RewardConfig(_target_="reward"), "reward._target_=reward"),
        (RewardConfig(components={"math": 1.0}, args={"a": 1}), "reward.args={a: 1}"),
        (RewardConfig(components={"math": 1.0}, workers=0), "reward.workers=0"),
        (RewardConfig(components={"math": 1.0}, timeout_s=0), "reward.timeout_s=0"),
        (RewardConfig(components={"math": 1.0}, max_failed_fraction=1.5), "reward.max_failed_fraction=1.5"),
    ):
        with refused(*setting.split("=", 1)):
            RunConfig(reward=config).validate()
