"""An interrupt while the trainer is busy with a model whose steps take much longer than `checkpoint.grace_s`."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.random_model import save_qwen3
from tests.recovery.test_recovery_runs import BOTH, state
from tests.runs import Run
from tests.tiny_models.tokenizer import build_tokenizer

GRACE_S = 8


def random_model(folder: Path) -> Path:
    """30 million parameters: a microbatch of this test takes a second or more on two cores."""
    tokenizer = build_tokenizer(1024)
    return save_qwen3(
        folder,
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@BOTH
def test_ctrl_c_in_a_long_step_saves_the_step_before(placement: str, start: Callable[..., Run], tmp_path: Path) -> None:
    """With two ranks, which end after the same microbatch."""
    devices = {"colocate": "placement.devices=2", "fully_async": "placement.trainer_devices=2"}[placement]
    run = start(
        f"placement={placement}",
        devices,
        "model=hf",
        "data=arithmetic",
        "rollout.max_prompt_tokens=64",
        "rollout.max_completion_tokens=24",
        f"model.path={random_model(tmp_path / 'model')}",
        "steps=20",
        "algorithm.prompts_per_step=16",
        "algorithm.group_size=16",
        "trainer.tokens_per_microbatch=512",
        "eval.before_train=false",
        "eval.every=0",
        "checkpoint.every=0",
        "checkpoint.export=false",
        f"checkpoint.grace_s={GRACE_S}",
    )
    run.wait_for_step(2, 600)
    last = run.metrics()[-1]
    train, microbatch = last["time/train"], last["time/microbatch_max"]
    assert train > 3 * microbatch

    time.sleep(last["time/generate"] * (placement == "colocate") + 0.25 * train)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(GRACE_S + 2 * microbatch + 30) == 130
    assert run.gone_within(15), run.processes()
    assert state(run.folder)["step"] == run.metrics()[-1]["step"] >= 2
    assert "was not saved" not in run.text
    assert "no reply from trainer ranks" not in run.text
