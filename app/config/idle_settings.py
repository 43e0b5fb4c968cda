"""Sentences on settings that cannot act, or hardly act, in a combination.

A preset may set what acts in most runs only (`eval.every=20`, in a run of three steps), so the rules name settings of
the command line, and of the algorithm those without their default.
"""

from collections.abc import Collection, Iterator
from dataclasses import fields

from app.config.algorithm import AlgorithmConfig, Correction
from app.config.data import Template
from app.config.model import TINY_PRESETS
from app.config.placement import PlacementKind
from app.config.run import Mode, RunConfig
from app.config.trainer import Optimizer, Schedule
from app.config.weight_sync import SyncMode

FULL_LR = 1e-6  # of full fine-tuning, as in our presets
TINY_FULL_LR = 2e-4
RATIO_IS_ONE = "with algorithm.updates_per_step=1 the ratio is 1"


def _rules(run: RunConfig) -> dict[str, tuple[bool, str]]:
    """Return by settings, or sections and mappings with all of theirs: whether they have no effect, and why."""
    algorithm = run.algorithm
    colocate = run.placement.kind is PlacementKind.colocate
    icepop = run.correction is Correction.icepop
    masks = run.correction is Correction.sequence_mask
    unprofiled = all(step > run.steps for step in run.trainer.profile_steps)

    clip = "algorithm.clip_low algorithm.clip_high algorithm.dual_clip algorithm.ratio"
    clips = algorithm.objective in ("ppo", "cispo", "dppo")
    pairs = "placement.trainer_devices placement.rollout_devices"
    engines = "rollout.engine_args device.engine_args rollout.memory_fraction rollout.port"
    return {
        clip: (algorithm.ratio_is_one, RATIO_IS_ONE),
        "algorithm.clip_low algorithm.clip_high": (not clips, f"algorithm.objective={algorithm.objective} has no clip"),
        "algorithm.dual_clip": (algorithm.objective != "ppo", "algorithm.objective is not ppo"),
        "algorithm.sapo_tau_positive algorithm.sapo_tau_negative": (
            algorithm.objective != "sapo",
            "algorithm.objective is not sapo",
        ),
        "algorithm.normalize_by_std": (algorithm.advantage != "grpo", "algorithm.advantage is not grpo"),
        "algorithm.tis_max": (run.correction is not Correction.tis, "the correction is not tis"),
        "algorithm.icepop_low algorithm.icepop_high": (not icepop, "the correction is not icepop"),
        "algorithm.kpop_threshold": (run.correction is not Correction.kpop, "the correction is not kpop"),
        "algorithm.sequence_mask_low algorithm.sequence_mask_high": (not masks, "the correction is not sequence_mask"),
        "algorithm.overlong_penalty": (
            algorithm.overlong_buffer_fraction == 0,
            "algorithm.overlong_buffer_fraction is 0",
        ),
        "algorithm.max_refill_rounds": (
            not algorithm.dynamic_sampling and not run.environment.multi_turn,
            "algorithm.dynamic_sampling is false",
        ),
        "algorithm.demonstrations_per_step": (run.data.demonstrations is None, "data.demonstrations is null"),
        "teacher": (not run.teacher.given_by, "there is no teacher: give teacher.path, teacher.urls or teacher.prompt"),
        "weight_sync.full_every weight_sync.snapshot": (
            run.weight_sync.mode is SyncMode.full,
            "weight_sync.mode is full",
        ),
        "trainer.lr_min_fraction": (run.trainer.schedule is Schedule.constant, "trainer.schedule is constant"),
        "trainer.beta1 trainer.beta2": (run.trainer.optimizer is Optimizer.sgd, "trainer.optimizer is sgd"),
        "trainer.profile_steps": (unprofiled, "the run has fewer steps"),
        "checkpoint.every checkpoint.keep_best": (run.checkpoint.keep == 0, "checkpoint.keep is 0"),
        "eval.top_p eval.top_k eval.min_p": (run.eval.temperature == 0, "eval.temperature is 0, which is greedy"),
        "eval.every": (run.eval.every > run.steps, "the run has fewer steps, and is evaluated after the last one"),
        "stop": (run.eval.every >= run.steps, "the run is evaluated after its last step only"),
        "data.thinking": (run.data.template is Template.plain, "data.template is plain"),
        "data.last_reply_only": (
            run.mode is not Mode.sft and run.data.demonstrations is None,
            "nothing is imitated: mode is not sft, and data.demonstrations is null",
        ),
        "environment": (not run.environment.multi_turn, "environment=single_turn has no episodes"),
        "model.lora.alpha model.lora.targets": (not run.model.lora.enabled, "model.lora.rank is 0"),
        "placement.devices": (not colocate, f"placement=fully_async has {pairs.replace(' ', ' and ')}"),
        pairs: (colocate, "placement=colocate has placement.devices"),
        engines: (bool(run.rollout.urls), "rollout.urls names servers that are running"),
    }


def idle_settings(run: RunConfig, given: Collection[str]) -> list[str]:
    """Return a sentence for each rule that names settings of this run, and for what keeps it from learning.

    Args:
        run: A valid configuration.
        given: Names of the settings on the command line.
    """
    settings = {key for key in given if "." in key}  # without the choices of groups
    chosen = sorted(settings | {*_not_default(run.algorithm)})
    sentences = []
    for keys, (applies, why) in _rules(run).items():
        named = tuple(f"{each}." for each in keys.split())
        idle = [key for key in chosen if f"{key}.".startswith(named)]
        if idle and applies:
            sentences.append(f"{_listed(idle)} no effect: {why}")
    if run.model.lora.path is not None and run.algorithm.needs_reference:
        sentences.append(
            "the reference of algorithm.kl is the model without the adapter of model.lora.path: the KL does not begin "
            "at 0; mode=export merges the adapter into a model to start from"
        )
    return [*sentences, *_joined(run, given), *_learns_nothing(run)]


def idle_clip(run: RunConfig) -> list[str]:
    """Return the sentence on a clip that nobody has set, which the plan has but no run."""
    chosen = {"algorithm.clip_low", "algorithm.clip_high"} & {*_not_default(run.algorithm)}
    if chosen or not run.algorithm.ratio_is_one or run.algorithm.objective != "ppo":
        return []
    return [f"algorithm.clip_low and algorithm.clip_high have no effect: {RATIO_IS_ONE}"]


def _not_default(algorithm: AlgorithmConfig) -> list[str]:
    default = AlgorithmConfig()
    names = [each.name for each in fields(algorithm)]
    return [f"algorithm.{name}" for name in names if getattr(algorithm, name) != getattr(default, name)]


def _joined(run: RunConfig, given: Collection[str]) -> Iterator[str]:
    """Name components of a preset that nobody mentioned, beside those of the user's own."""
    named = {key.split(".")[2] for key in given if key.startswith("reward.components.")}
    own = [name for name, term in run.reward.terms().items() if term.target is not None and name in named]
    preset = [name for name in run.reward.terms() if name not in named]
    if own and preset and "reward" not in given:
        removed = " ".join(f"~reward.components.{name}" for name in preset)
        yield (
            f"the reward is {run.reward.formula}, with {', '.join(preset)} of a preset beside your {', '.join(own)}: "
            f"{removed} takes that out"
        )


def _learns_nothing(run: RunConfig) -> Iterator[str]:
    if run.trainer.warmup_steps >= run.optimizer_updates:
        yield (
            f"trainer.warmup_steps={run.trainer.warmup_steps} is all of the run's {run.optimizer_updates} optimizer "
            f"updates: the learning rate does not reach trainer.lr={run.trainer.lr:g} before the end"
        )
    if all(term.weight == 0 for term in run.reward.terms().values()):
        yield "reward.components has weights of 0 only: every reward is 0, and nothing is learned"

    full = TINY_FULL_LR if run.model.name in TINY_PRESETS else FULL_LR
    if run.model.lora.enabled and run.trainer.peak_lr <= 2 * full:
        yield (
            f"trainer.lr={run.trainer.lr:g} is a rate for full fine-tuning: adapters need about ten times as much, "
            "whatever their rank"
        )


def _listed(keys: list[str]) -> str:
    """Return settings and their verb: "a, b and c have".

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a has', 'a, b and c have')
    """
    *first, last = keys
    return f"{', '.join(first)} and {last} have" if first else f"{last} has"
