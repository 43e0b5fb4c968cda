"""Custom rewards are tried on made-up completions before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from app.config.reward import RewardConfig
from app.reward import tryout
from app.reward.tryout import made_up, tokenizer_of, try_rewards
from app.types import Prompt
from tests.refusals import refused
from tests.reward.scorers import WriteReward, trajectory

END = 7


def tokens(text: str) -> list[int]:
    return [*text.encode(), END]


PROMPTS = [trajectory("", answer=str(index), prompt_id=f"set/{index}@0", level=index).prompt for index in range(5)]


def tried(prompts: list[Prompt], **settings: Any) -> list[str]:
    return try_rewards(RewardConfig(**settings), prompts, tokens)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('score')", "exception: KeyError: 'score' at "),
        ("return None", "value: returned a NoneType"),
        ("return [float('nan')] * len(trajectories)", "value: returned nan"),
        ("return [1.0]", "value: returned 1 values"),
        ("import os; os._exit(3)", "(exit code 3)"),
    ],
)
def test_a_reward_that_fails_on_everything_is_refused(custom_reward: WriteReward, body: str, reason: str) -> None:
    module = custom_reward(f"def broken(trajectories):\n    {body}\n")
    with refused("reward._target_", f"{module}.broken", reason, "reward.tryout=false"):
        tried(PROMPTS[:1], _target_=f"{module}.broken")


def test_a_reward_that_hangs_is_refused_at_its_deadline_and_named_before(
    custom_reward: WriteReward, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tryout, "SLOW_SECONDS", 0.2)
    module = custom_reward("import time\ndef stuck(trajectories):\n    time.sleep(1000)\n")
    components = {"exact": 1.0, "slow": {"_target_": f"{module}.stuck"}}
    with refused("reward.components.slow._target_", f"{module}.stuck", "within 1 s", "reward.timeout_s=1"):
        tried(PROMPTS, components=components, timeout_s=1.0)
    said = capsys.readouterr().err
    assert said == "trying reward component slow: no result after 0.2 s; it has 1 s\n"


def test_a_reward_that_fails_on_some_completions_is_a_warning(custom_reward: WriteReward) -> None:
    module = custom_reward("def first(trajectory):\n    return float(trajectory.text.split()[0] == '1')\n")
    (warning,) = tried(PROMPTS, _target_=f"{module}.first")
    for named in ("reward component first ", " 3 of 6 ", "exception: IndexError: ", f"{module}.py:2."):
        assert named in warning


def test_a_slow_reward_is_a_warning_and_is_tried_on_one_prompt(
    custom_reward: WriteReward, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tryout, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(tryout, "MAX_COMPONENT_SECONDS", 0.2)
    calls = tmp_path / "calls"
    module = custom_reward(
        "import time\n"
        "def judge(trajectories, calls):\n"
        "    open(calls, 'a').write('x')\n"
        "    time.sleep(0.5)\n"
        "    return [1.0] * len(trajectories)\n"
    )
    (warning,) = tried(PROMPTS, _target_=f"{module}.judge", args={"calls": str(calls)})
    assert warning.startswith("reward component judge took ")
    assert "reward.workers" in warning
    assert calls.read_text() == "x"


def test_a_good_reward_sees_real_rows_with_the_answer_and_an_empty_text(
    custom_reward: WriteReward, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    module = custom_reward(
        "def see(trajectories, seen):\n"
        "    with open(seen, 'a') as file:\n"
        "        for one in trajectories:\n"
        "            print(one.prompt.row['level'], one.text, one.completion.token_ids.tolist(), sep='|', file=file)\n"
        "    return [0.0] * len(trajectories)\n"
    )
    assert tried(PROMPTS, _target_=f"{module}.see", args={"seen": str(seen)}) == []
    assert seen.read_text().split() == [
        "0|0|[48,",
        "7]",
        "0||[7]",
        "1|1|[49,",
        "7]",
        "1||[7]",
        "2|2|[50,",
        "7]",
        "2||[7]",
    ]


def test_without_the_tryout_a_reward_is_only_loaded(custom_reward: WriteReward) -> None:
    module = custom_reward("def broken(trajectories):\n    1 / 0\n")
    assert tried(PROMPTS, _target_=f"{module}.broken", tryout=False) == []
    with refused("reward._target_", "os.no_such", "no no_such"):
        tried(PROMPTS, _target_="os.no_such", tryout=False)


def test_built_in_components_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tryout, "RewardPool", None)
    assert tried(PROMPTS, components={"math": 1.0, "exact": 0.5}) == []


def test_made_up_completions_have_a_token() -> None:
    trajectory = made_up(PROMPTS[0], "", lambda _: [])
    assert trajectory.completion.token_ids.tolist() == [0]
    assert trajectory.completion.spans[0].end == 1


def test_a_completion_ends_as_the_tokenizer_ends_a_sequence(tiny_model: Path) -> None:
    from app.model.hf_directory import load_tokenizer

    tokenizer = load_tokenizer(tiny_model, trust_remote_code=False)
    encode = tokenizer_of(tokenizer)
    assert encode("") == [tokenizer.eos_token_id]
    assert tokenizer.decode(encode("46"), skip_special_tokens=True) == "46"
