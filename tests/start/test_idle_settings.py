"""Settings without effect are named, and no other ones."""

import pytest

from app.start.idle_settings import idle_settings
from tests.compose import composed

ASYNC = "placement=fully_async"
CALCULATOR = ["environment=calculator", "model=tiny_tools", "data=products"]
OWN = "+reward.components.brief._target_=my.brief"


def sentences(*overrides: str) -> list[str]:
    given = [each.lstrip("+").partition("=")[0] for each in overrides]
    return idle_settings(composed(*overrides), given)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.clip_high=0.3"], "algorithm.clip_high"),
        (["algorithm=gspo", "algorithm.updates_per_step=1"], "algorithm.clip_high, algorithm.clip_low, algorithm.rat"),
        (["algorithm=sapo", "algorithm.clip_low=0.1"], "algorithm.clip_low"),
        (["algorithm.correction_high=3"], "algorithm.correction_high"),
        (["algorithm.correction_low=0.4", "algorithm.correction=tis"], "algorithm.correction_low"),
        (["algorithm.overlong_penalty=2"], "algorithm.overlong_penalty"),
        (["algorithm.demonstrations_per_step=4"], "algorithm.demonstrations_per_step"),
        (["teacher.coefficient=2", "teacher.clip=1"], "teacher.clip, teacher.coefficient"),
        (["checkpoint.every=5", "checkpoint.keep=0"], "checkpoint.every"),
        (["eval.top_p=0.9", "eval.top_k=20"], "eval.top_k, eval.top_p"),
        (["data.thinking=true"], "data.thinking"),
        (["steps=20", "stop.patience=3"], "stop.patience"),
        (["environment.max_turns=3", "environment.args={}"], "environment.args, environment.max_turns"),
        (["model.lora.alpha=16"], "model.lora.alpha"),
        ([ASYNC, "placement.devices=1"], "placement.devices"),
        (["placement.trainer_devices=2"], "placement.trainer_devices"),
        (["rollout.urls=[http://127.0.0.1:9]", "rollout.memory_fraction=0.5"], "rollout.memory_fraction"),
        (["algorithm.updates_per_step=2", "algorithm=sapo", "algorithm.dual_clip=3"], "algorithm.dual_clip"),
        (["algorithm=rloo", "algorithm.normalize_by_std=false"], "algorithm.normalize_by_std"),
        (["algorithm.max_refill_rounds=2"], "algorithm.max_refill_rounds"),
        (["trainer.lr_min_fraction=0.1"], "trainer.lr_min_fraction"),
        (["offload.engine=false"], "offload.engine"),
        (["device=cuda", "model=qwen3_4b", ASYNC, "offload.trainer=false"], "offload.trainer"),
        (["weight_sync.snapshot=host"], "weight_sync.snapshot"),
        (["algorithm.kl=k3"], "algorithm.kl=k3"),
        (["environment=verifiers", "environment.id=x", "data=environment", "data.suffix=x"], "data.suffix"),
        (["steps=12", "trainer.profile_steps=[0,12,13]"], "trainer.profile_steps=[0, 13]"),
        (["trainer.warmup_steps=60"], "trainer.warmup_steps"),
        (["reward.components.exact=0", "+reward.components.format=0"], "reward.components"),
        (["model=tiny_lora", "trainer.lr=2e-4"], "trainer.lr"),
        ([OWN], "the reward is 1 · exact + 1 · brief: ~reward.components.exact"),
    ],
)
def test_a_setting_without_effect_is_named(overrides: list[str], named: str) -> None:
    (sentence,) = sentences(*overrides)
    assert sentence.startswith(named)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["steps=3"],  # eval.every=20 is the preset's
        ["checkpoint.keep=0"],
        *([f"algorithm={name}"] for name in ("dapo", "gspo", "dr_grpo", "cispo", "dppo", "sapo", "rloo", "maxrl")),
        ["algorithm.updates_per_step=2", "algorithm.clip_low=0.1", "algorithm.dual_clip=3"],
        [ASYNC, "placement.max_staleness=1", "algorithm.correction_high=3"],
        ["algorithm.correction=kpop", "algorithm.correction_high=0.2"],
        ["algorithm.overlong_buffer_fraction=0.2", "algorithm.overlong_penalty=2"],
        ["eval.temperature=1", "eval.top_p=0.9"],
        ["algorithm=dapo", "algorithm.max_refill_rounds=2"],
        ["trainer.schedule=cosine", "trainer.lr_min_fraction=0.1"],
        ["device=cuda", "model=qwen3_4b", "offload.engine=false", "offload.trainer=false"],
        ["algorithm.kl=k3", "algorithm.kl_coefficient=0.04"],
        [*CALCULATOR, "environment.max_turns=3"],
        ["environment=single_turn"],
        ["model=tiny_lora", "model.lora.alpha=16"],
        [ASYNC, "placement.trainer_devices=2"],
        ["trainer.warmup_steps=59"],
        ["+reward.components.format=0"],
        [OWN, "reward.components.exact=0.5"],
    ],
)
def test_settings_that_act_and_those_of_presets_are_not_named(overrides: list[str]) -> None:
    assert sentences(*overrides) == []
