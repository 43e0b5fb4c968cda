"""Settings that cannot act are named, and no other ones."""

from pathlib import Path

import pytest

from app.config.idle_settings import idle_clip, idle_settings
from app.config.own_data import with_preset
from tests.compose import composed
from tests.warm import run_warm

ASYNC = "placement=fully_async"


def sentences(*overrides: str) -> list[str]:
    given = [each.lstrip("+").partition("=")[0] for each in overrides]
    return idle_settings(composed(*with_preset(overrides)), given)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.clip_high=0.3"], "algorithm.clip_high"),
        (["algorithm.dual_clip=3", "algorithm.clip_low=0.2"], "algorithm.clip_low and algorithm.dual_clip"),
        (
            ["algorithm=gspo", "algorithm.updates_per_step=1"],
            "algorithm.clip_high, algorithm.clip_low and algorithm.ratio",
        ),
        (["algorithm.tis_max=3"], "algorithm.tis_max"),
        (["algorithm.icepop_low=0.4", "algorithm.correction=tis"], "algorithm.icepop_low"),
        (["algorithm.kpop_threshold=0.2", "algorithm.correction=icepop"], "algorithm.kpop_threshold"),
        (["algorithm.sequence_mask_high=1.1"], "algorithm.sequence_mask_high"),
        (["algorithm.overlong_penalty=2"], "algorithm.overlong_penalty"),
        (["algorithm.max_refill_rounds=3"], "algorithm.max_refill_rounds"),
        (["algorithm.demonstrations_per_step=4"], "algorithm.demonstrations_per_step"),
        (["teacher.coefficient=2", "teacher.clip=1"], "teacher.clip and teacher.coefficient"),
        (["weight_sync.full_every=3"], "weight_sync.full_every"),
        (["trainer.lr_min_fraction=0.1"], "trainer.lr_min_fraction"),
        (["trainer.optimizer=sgd", "trainer.beta1=0.5"], "trainer.beta1"),
        (["trainer.profile_steps=[61,70]"], "trainer.profile_steps"),
        (["checkpoint.every=5", "checkpoint.keep=0"], "checkpoint.every"),
        (["eval.top_p=0.9"], "eval.top_p"),
        (["eval.min_p=0.1", "eval.top_k=20"], "eval.min_p and eval.top_k"),
        (["steps=3", "eval.every=4"], "eval.every"),
        (["data.thinking=true"], "data.thinking"),
        (["data.last_reply_only=true"], "data.last_reply_only"),
        (["steps=20", "stop.patience=3"], "stop.patience"),
        (["environment.max_turns=3", "environment.args={}"], "environment.args and environment.max_turns"),
        (["model.lora.alpha=16"], "model.lora.alpha"),
        ([ASYNC, "placement.devices=1"], "placement.devices"),
        (["placement.trainer_devices=2"], "placement.trainer_devices"),
        (
            ["rollout.urls=[http://127.0.0.1:9]", "+rollout.engine_args.sleep-on-idle=true"],
            "rollout.engine_args.sleep-on-idle",
        ),
    ],
)
def test_a_setting_without_effect_is_named(overrides: list[str], named: str) -> None:
    (sentence,) = sentences(*overrides)
    assert sentence.startswith(f"{named} ha")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["steps=3"],  # eval.every=20 is the preset's
        ["checkpoint.keep=0"],
        ["model=hf", "model.path=me/model", "steps=3", "data.path=rows.jsonl"],
        ["algorithm=dapo"],
        ["algorithm=gspo"],
        ["algorithm=dr_grpo"],
        ["algorithm=cispo"],
        ["algorithm=dppo"],
        ["algorithm=sapo"],
        ["algorithm=rloo"],
        ["algorithm=maxrl"],
        ["algorithm.updates_per_step=2", "algorithm.clip_low=0.1", "algorithm.dual_clip=3"],
        ["algorithm.old_policy=rollout", "algorithm.clip_low=0.1"],
        [ASYNC, "placement.max_staleness=1", "algorithm.tis_max=3"],
        ["algorithm.correction=icepop", "algorithm.icepop_low=0.4"],
        ["algorithm.correction=kpop", "algorithm.kpop_threshold=0.2"],
        ["algorithm.overlong_buffer_fraction=0.2", "algorithm.overlong_penalty=2"],
        ["trainer.schedule=cosine", "trainer.lr_min_fraction=0.1"],
        ["trainer.profile_steps=[3,70]"],
        ["eval.temperature=1", "eval.top_p=0.9", "eval.top_k=20", "eval.min_p=0.1"],
        ["data.thinking=true", "data.template=chat"],
        ["environment=calculator", "model=tiny_tools", "data=products", "environment.max_turns=3"],
        ["environment=calculator", "model=tiny_tools", "data=products", "algorithm.max_refill_rounds=3"],
        ["environment=single_turn"],
        ["model=tiny_lora", "model.lora.alpha=16"],
        ["placement.devices=1"],
        [ASYNC, "placement.trainer_devices=2"],
        ["trainer.warmup_steps=59"],
        ["+reward.components.format=0"],
    ],
)
def test_settings_that_act_and_those_of_presets_are_not_named(overrides: list[str]) -> None:
    assert sentences(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["trainer.warmup_steps=60"], "trainer.warmup_steps=60"),
        (["steps=3", "algorithm.updates_per_step=4", "trainer.warmup_steps=12"], "trainer.warmup_steps=12"),
        (["reward.components.exact=0", "+reward.components.format=0"], "reward.components"),
        (["model=tiny_lora", "trainer.lr=2e-4"], "trainer.lr=0.0002 is a rate for full fine-tuning"),
        (["model=qwen3_4b_lora", "trainer.lr=1e-6"], "trainer.lr=1e-06 is a rate for full fine-tuning"),
    ],
)
def test_a_run_that_can_hardly_learn_is_named(overrides: list[str], named: str) -> None:
    (sentence,) = sentences(*overrides)
    assert sentence.startswith(named)


def test_a_rate_for_adapters_is_not_named() -> None:
    for overrides in (["model=tiny_lora"], ["model=qwen3_4b_lora"], ["trainer.lr=1e-6"], ["model.lora.rank=8"]):
        assert sentences(*overrides) == []


OWN = "+reward.components.brief._target_=my.brief"


def test_components_of_a_preset_beside_ones_own_are_named_unless_they_were_asked_for() -> None:
    (sentence,) = sentences("model=hf", "model.path=me/model", OWN, "+reward.components.brief.weight=0.2")
    assert "1 · math + 0.2 · brief" in sentence
    assert "~reward.components.math" in sentence
    for overrides in (["reward=math"], ["reward.components.math=0.5"]):
        assert sentences("model=hf", "model.path=me/model", OWN, *overrides) == []
    assert sentences("+reward.components.format=0.1") == []


def test_only_the_plan_names_the_idle_clip_of_a_run_that_sets_none() -> None:
    (sentence,) = idle_clip(composed())
    assert sentence.startswith("algorithm.clip_low and algorithm.clip_high have no effect")
    assert idle_clip(composed("algorithm=dapo")) == idle_clip(composed("algorithm.clip_low=0.1")) == []


def test_the_command_line_says_which_settings_are_given(tmp_path: Path) -> None:
    given = run_warm("mode=plan", "steps=3", "eval.every=4", cwd=tmp_path).stdout
    assert "\n  eval.every has no effect" in given
    alone = run_warm("mode=plan", "steps=3", cwd=tmp_path).stdout
    assert "eval.every" not in alone
    assert "\n  algorithm.clip_low and algorithm.clip_high have no effect" in alone
