"""Custom rewards are tried on made-up completions before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from app.config.reward import RewardConfig
from app.reward import tryout
from app.reward.tryout import tokenizer_of, try_rewards
from app.types import Prompt
from tests.refusals import refused
from tests.reward.scorers import OWN, trajectory

END = 7


def tokens(text: str) -> list[int]:
    return [*text.encode(), END]


PROMPTS = [trajectory("", answer=str(index), prompt_id=f"set/{index}@0", level=index).prompt for index in range(5)]


def tried(prompts: list[Prompt], **settings: Any) -> list[str]:
    return try_rewards(RewardConfig(**settings), prompts, tokens)


def test_a_reward_that_fails_on_everything_is_refused() -> None:
    with refused("reward._target_", f"{OWN}.dies", "exit code 3", "reward.tryout=false"):
        tried(PROMPTS[:1], _target_=f"{OWN}.dies")


def test_a_reward_that_applies_to_nothing_is_named() -> None:
    (warning,) = tried(PROMPTS, components={"exact": 1.0, "shy": {"_target_": f"{OWN}.undecided"}})
    assert warning.startswith("reward component shy has no opinion (None) on each of ")


def test_a_reward_that_hangs_is_refused_at_its_deadline_and_named_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tryout, "SLOW_SECONDS", 0.2)
    components = {"exact": 1.0, "slow": {"_target_": f"{OWN}.hangs"}}
    with refused("reward.components.slow._target_", f"{OWN}.hangs", "within 1 s", "reward.timeout_s"):
        tried(PROMPTS, components=components, timeout_s=1.0)
    assert capsys.readouterr().err == "trying reward component slow: no result after 0.2 s; it has 1 s\n"


def test_a_good_reward_sees_real_rows_with_the_answer_and_an_empty_text(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    assert tried(PROMPTS, _target_=f"{OWN}.sees", args={"seen": str(seen)}) == []
    assert seen.read_text().splitlines() == [
        line for level in range(3) for line in (f"{level}|{level}|[{48 + level}, {END}]", f"{level}||[{END}]")
    ]


def test_a_completion_ends_as_the_tokenizer_ends_a_sequence(tiny_model: Path) -> None:
    from app.model.hf_directory import load_tokenizer

    tokenizer = load_tokenizer(tiny_model, trust_remote_code=False)
    encode = tokenizer_of(tokenizer)
    assert encode("") == [tokenizer.eos_token_id]
    assert tokenizer.decode(encode("46"), skip_special_tokens=True) == "46"
