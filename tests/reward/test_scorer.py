import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from app.config import RunConfig
from app.config.reward import RewardConfig
from app.errors import ConfigError, RunError
from app.reward.outcome import FailureKind
from app.reward.scorer import Scorer

TOWER = "\\boxed{9^{9^{9^{9}}}}"


@contextlib.contextmanager
def scorer(step_trajectories: int = 1000, log=None, **settings) -> Iterator[Scorer]:
    made = Scorer(RewardConfig(**settings), step_trajectories=step_trajectories, log=log)
    try:
        yield made
    finally:
        made.close()


def score(made: Scorer, trajectories) -> list[float]:
    return [scored.reward for scored in asyncio.run(made.score(trajectories))]


def failed(made: Scorer) -> dict[str, int]:
    return {kind.name: count for kind, count in made.failures.items() if count}


# weighted sums


def test_the_reward_is_the_weighted_sum_and_every_part_is_kept_unweighted(trajectory):
    with scorer(components={"math": 1.0, "format": 0.25, "exact": -0.5}) as made:
        boxed, plain, wrong = asyncio.run(
            made.score([trajectory("\\boxed{42}"), trajectory("42"), trajectory("\\boxed{1}")])
        )
    assert boxed.reward == 1.25
    assert boxed.reward_components == {"math": 1.0, "format": 1.0, "exact": 0.0}
    assert plain.reward == 0.5
    assert plain.reward_components == {"math": 1.0, "format": 0.0, "exact": 1.0}
    assert wrong.reward == 0.25


def test_a_weight_of_zero_only_measures(trajectory):
    with scorer(components={"exact": 1.0, "format": 0.0}) as made:
        (scored,) = asyncio.run(made.score([trajectory("\\boxed{42}")]))
    assert scored.reward == 0.0
    assert scored.reward_components == {"exact": 0.0, "format": 1.0}


def test_nothing_to_score_is_nothing(trajectory):
    with scorer(components={"math": 1.0}) as made:
        assert score(made, []) == []


def test_exact_costs_less_than_five_milliseconds_for_a_step_and_starts_no_process(trajectory):
    batch = [trajectory("42", prompt_id=f"set/{place // 8}@0") for place in range(128)]

    async def fastest(made: Scorer) -> float:
        times = []
        for _ in range(10):
            begin = time.perf_counter()
            await made.score(batch)
            times.append(time.perf_counter() - begin)
        return min(times)

    with scorer(components={"exact": 1.0}) as made:
        assert asyncio.run(fastest(made)) < 5e-3
        assert made._workers == []


# a user's own reward


def test_a_function_gets_the_trajectories_of_one_prompt_and_its_arguments(own_reward, trajectory):
    module = own_reward(
        "def place(trajectories, scale=1.0):\n"
        "    assert len({one.prompt.id for one in trajectories}) == 1\n"
        "    return [scale * place + len(one.completion.token_ids) for place, one in enumerate(trajectories)]\n"
    )
    batch = [trajectory("a", prompt_id="set/1@0")] * 3 + [trajectory("b", prompt_id="set/2@0")] * 2
    with scorer(_target_=f"{module}.place", args={"scale": 0.5}) as made:
        scored = asyncio.run(made.score(batch))
    assert [one.reward for one in scored] == [8, 8.5, 9, 8, 8.5]
    assert scored[1].reward_components == {"place": 8.5}


def test_a_class_is_made_once_and_keeps_its_state(own_reward, trajectory):
    module = own_reward(
        "class Counter:\n"
        "    def __init__(self, start):\n"
        "        self.calls = start\n"
        "    def __call__(self, trajectories):\n"
        "        self.calls += 1\n"
        "        return [self.calls] * len(trajectories)\n"
    )
    with scorer(_target_=f"{module}.Counter", args={"start": 10}) as made:
        assert score(made, [trajectory("a")] * 2) == [11, 11]
        assert score(made, [trajectory("a")]) == [12]


def test_an_async_reward_is_awaited_on_one_loop(own_reward, trajectory):
    module = own_reward(
        "import asyncio\n"
        "loops = set()\n"
        "async def one(trajectory):\n"
        "    await asyncio.sleep(0.2)\n"
        "    return len(trajectory.text)\n"
        "async def judge(trajectories):\n"
        "    loops.add(id(asyncio.get_running_loop()))\n"
        "    assert len(loops) == 1\n"
        "    return await asyncio.gather(*(one(trajectory) for trajectory in trajectories))\n"
    )
    with scorer(_target_=f"{module}.judge") as made:
        begin = time.perf_counter()
        assert score(made, [trajectory("a" * length) for length in range(8)]) == list(range(8))
        assert time.perf_counter() - begin < 1.2
        assert score(made, [trajectory("aa")]) == [2]
        assert failed(made) == {}


def test_numpy_values_integers_and_booleans_are_numbers(own_reward, trajectory):
    module = own_reward(
        "import numpy as np\n"
        "def array(trajectories):\n"
        "    return np.arange(len(trajectories), dtype=np.float32)\n"
        "def mixed(trajectories):\n"
        "    return [True, 2, np.float64(0.5), np.int64(7)]\n"
    )
    with scorer(_target_=f"{module}.array") as made:
        assert score(made, [trajectory("a")] * 3) == [0, 1, 2]
    with scorer(_target_=f"{module}.mixed") as made:
        assert score(made, [trajectory("a")] * 4) == [1, 2, 0.5, 7]


def test_several_workers_score_at_the_same_time(own_reward, trajectory):
    module = own_reward(
        "import os, time\ndef slow(trajectories):\n    time.sleep(0.3)\n    return [os.getpid()] * len(trajectories)\n"
    )
    batch = [trajectory("a", prompt_id=f"set/{place}@0") for place in range(4)]
    with scorer(_target_=f"{module}.slow", workers=4) as made:
        assert len(set(score(made, batch))) == 4


def test_printing_goes_to_the_log(own_reward, trajectory, tmp_path):
    module = own_reward(
        "def chatty(trajectories):\n    print('hello', flush=True)\n    return [1] * len(trajectories)\n"
    )
    log = tmp_path / "reward.log"
    with scorer(_target_=f"{module}.chatty", log=log) as made:
        assert score(made, [trajectory("a")]) == [1]
    assert log.read_text() == "hello\n"


# rewards that fail


def test_the_guilty_trajectory_fails_and_the_others_of_its_call_do_not(own_reward, trajectory):
    module = own_reward(
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
        with scorer(_target_=f"{module}.touchy", timeout_s=1.0) as made:
            assert score(made, [trajectory(one) for one in ("a", text, "b")]) == [1, 0, 1]
            assert failed(made) == {kind: 1}


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
def test_what_is_not_one_finite_number_each_is_counted_and_scores_zero(own_reward, trajectory, value, expected):
    module = own_reward(f"def odd(trajectories):\n    return {value}\n")
    with scorer(_target_=f"{module}.odd") as made:
        assert score(made, [trajectory("a")] * 3) == expected
        assert failed(made) == {"value": 3 - sum(map(bool, expected))}


def test_a_failed_part_makes_the_whole_reward_zero(trajectory):
    with scorer(components={"math": 1.0, "format": 0.5}, timeout_s=0.5) as made:
        (scored,) = asyncio.run(made.score([trajectory(TOWER)]))
    assert scored.reward == 0.0
    assert scored.reward_components == {"math": 0.0, "format": 1.0}


def test_a_pathological_answer_costs_at_most_the_limit_and_the_worker_is_replaced(trajectory):
    with scorer(components={"math": 1.0}, timeout_s=1.0) as made:
        assert score(made, [trajectory("\\boxed{42}")]) == [1]
        before = made._workers[0].pid
        begin = time.perf_counter()
        assert score(made, [trajectory(TOWER)]) == [0]
        assert time.perf_counter() - begin < 1.8
        assert made._workers[0].pid != before
        assert not os.path.exists(f"/proc/{before}")
        assert score(made, [trajectory("\\boxed{42}"), trajectory("9**9**9**9"), trajectory("42")]) == [1, 0, 1]
        assert failed(made) == {"timeout": 2}


@pytest.mark.parametrize("text", ["\\boxed{" * 500, "(" * 5000, "$" * 5000, "1," * 5000, "9" * 20000, "\\frac{" * 500])
def test_an_answer_that_no_one_can_read_scores_zero_without_a_failure(trajectory, text):
    with scorer(components={"math": 1.0}, timeout_s=20.0) as made:
        assert score(made, [trajectory(text)]) == [0]
        assert failed(made) == {}


# when too many fail


def test_too_many_failures_in_a_step_end_the_run_with_the_last_one(own_reward, trajectory):
    module = own_reward("def broken(trajectories):\n    raise KeyError('score')\n")
    with scorer(_target_=f"{module}.broken", max_failed_fraction=0.25, step_trajectories=16) as made:
        assert score(made, [trajectory("a")] * 4) == [0, 0, 0, 0]
        with pytest.raises(RunError) as caught:
            score(made, [trajectory("a")])
    message = str(caught.value)
    assert message.startswith(
        "The reward failed on 5 of 5 trajectories, more than reward.max_failed_fraction=0.25 of a step's 16 allows; "
        "the last one: part broken, exception: KeyError: 'score' at "
    )
    assert message.endswith(f"{module}.py:2.")


def test_as_many_failures_as_allowed_in_every_step_never_end_the_run(own_reward, trajectory):
    module = own_reward(
        "def some(trajectories):\n    return [float('nan') if one.text == 'x' else 1 for one in trajectories]\n"
    )
    with scorer(_target_=f"{module}.some", max_failed_fraction=0.25, step_trajectories=4) as made:
        for _ in range(5):
            assert score(made, [trajectory(text) for text in "xaaa"]) == [0, 1, 1, 1]
        assert made.metrics == {
            "reward/failed_timeout": 0.0,
            "reward/failed_exception": 0.0,
            "reward/failed_value": 5.0,
            "reward/failed_died": 0.0,
            "reward/failed_fraction": 0.25,
        }


def test_a_short_step_is_judged_at_its_end(own_reward, trajectory):
    module = own_reward("def broken(trajectories):\n    return None\n")
    with scorer(_target_=f"{module}.broken", step_trajectories=1000) as made:
        score(made, [trajectory("a")] * 2)
        with pytest.raises(RunError, match=r"failed on 2 of 2 trajectories"):
            made.check()


def test_a_fraction_of_zero_allows_none_and_of_one_all(own_reward, trajectory):
    module = own_reward("def broken(trajectories):\n    return None\n")
    with scorer(_target_=f"{module}.broken", max_failed_fraction=0.0) as made, pytest.raises(RunError):
        score(made, [trajectory("a")])
    with scorer(_target_=f"{module}.broken", max_failed_fraction=1.0, step_trajectories=2) as made:
        score(made, [trajectory("a")] * 6)
        made.check()


# configuration


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module.reward", "there is no module no_such_module (it must be in this folder or on PYTHONPATH)"),
        ("os.no_such_package.reward", "module os has no no_such_package.reward"),
        ("{own}.missing", "module {own} has no missing"),
        ("{own}.NUMBER", "it is not a function or class"),
        ("{own}.no_arguments", "it cannot be made or called with {} (TypeError: too many positional arguments"),
        ("{own}.Needy", "it cannot be made or called with {} (TypeError: Needy.__init__() missing 1 required"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_configuration_error(own_reward, target, reason):
    module = own_reward(
        "NUMBER = 3\ndef no_arguments():\n    return []\nclass Needy:\n    def __init__(self, needed):\n        pass\n"
    )
    target, reason = target.replace("{own}", module), reason.replace("{own}", module)
    with pytest.raises(ConfigError) as caught:
        Scorer(RewardConfig(_target_=target))
    assert str(caught.value).startswith(f"reward._target_={target} is not accepted: give a function or class that can")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library\n", "needs a module that is missing (No module named 'no_such_library')"),
        ("1 / 0\n", "cannot be imported (ZeroDivisionError: division by zero at "),
        ("def broken(:\n", "cannot be imported (SyntaxError: "),
        ("import os\nos._exit(1)\n", "ended while it loaded reward"),
    ],
)
def test_a_module_that_fails_to_import_says_why(own_reward, source, reason):
    module = own_reward(source)
    with pytest.raises(ConfigError) as caught:
        Scorer(RewardConfig(_target_=f"{module}.reward"))
    assert reason in str(caught.value)


def test_wrong_settings_are_refused():
    for config, key in (
        (RewardConfig(), "reward.components={}"),
        (RewardConfig(components={"mth": 1.0}), "reward.components=mth"),
        (RewardConfig(components={"math": math.nan}), "reward.components.math=nan"),
        (RewardConfig(_target_="reward"), "reward._target_=reward"),
        (RewardConfig(components={"math": 1.0}, args={"a": 1}), "reward.args={'a': 1}"),
        (RewardConfig(components={"math": 1.0}, workers=0), "reward.workers=0"),
        (RewardConfig(components={"math": 1.0}, timeout_s=0), "reward.timeout_s=0"),
        (RewardConfig(components={"math": 1.0}, max_failed_fraction=1.5), "reward.max_failed_fraction=1.5"),
    ):
        with pytest.raises(ConfigError, match="is not accepted: give ") as caught:
            RunConfig(reward=config).validate()
        assert str(caught.value).startswith(key)


# processes


def test_workers_import_no_torch_and_no_hydra(own_reward, trajectory):
    module = own_reward(
        "import sys\n"
        "def heavy(trajectories):\n"
        "    return [sum(name in sys.modules for name in ('torch', 'hydra', 'omegaconf', 'ray', 'transformers'))]\n"
    )
    with scorer(_target_=f"{module}.heavy") as made:
        assert score(made, [trajectory("a")]) == [0]
        assert failed(made) == {}


def test_closing_ends_every_worker_and_whatever_is_being_scored(own_reward, trajectory):
    module = own_reward("import time\ndef hang(trajectories):\n    time.sleep(1000)\n")

    async def close_while_scoring(made: Scorer) -> list[float]:
        scoring = asyncio.create_task(made.score([trajectory("a")]))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(made.close)
        return [scored.reward for scored in await scoring]

    made = Scorer(RewardConfig(_target_=f"{module}.hang", timeout_s=100.0, workers=2), step_trajectories=1000)
    pids = [worker.pid for worker in made._workers]
    begin = time.perf_counter()
    assert asyncio.run(close_while_scoring(made)) == [0]
    assert time.perf_counter() - begin < 5
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_workers_die_with_a_parent_that_is_killed_even_while_they_hang(trajectory, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "import numpy as np\n"
        "from app.config.reward import RewardConfig\n"
        "from app.reward.scorer import Scorer\n"
        "from app.types import Completion, FinishReason, Prompt, Trajectory, VersionSpan\n"
        "completion = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), FinishReason.stop,\n"
        "                        (VersionSpan(0, 0, 1),))\n"
        "def trajectory(text):\n"
        "    return Trajectory(Prompt('set/0@0', np.zeros(1, np.int32), '42', 'set'), completion, text)\n"
        "async def main():\n"
        "    made = Scorer(RewardConfig(components={'math': 1.0}, workers=2, timeout_s=1000.0))\n"
        "    await made.score([trajectory('42')] * 8)\n"
        "    print(*(worker.pid for worker in made._workers), flush=True)\n"
        f"    await made.score([trajectory({TOWER!r})])\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            time.sleep(0.5)  # one of them is computing the tower by now
        finally:
            parent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"{alive} outlived their parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie that waits for its new parent."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_failure_kinds_have_a_metric_each():
    with scorer(components={"exact": 1.0}) as made:
        assert set(made.metrics) == {f"reward/failed_{kind.name}" for kind in FailureKind} | {"reward/failed_fraction"}
