"""Warnings for settings that have no effect, and for runs that cannot learn.

A preset may set what acts in most runs only (`eval.every=20`, in a run of three steps), so the rules name settings of
the command line, and of the algorithm those without their default.
"""

from collections.abc import Collection, Iterator
from dataclasses import fields

from app.config.algorithm import AlgorithmConfig, Correction, OldPolicy
from app.config.data import Template
from app.config.device import DeviceKind
from app.config.environment import EnvironmentKind
from app.config.model import TINY_PRESETS
from app.config.run import RunConfig
from app.config.trainer import Schedule
from app.config.weight_sync import SyncMode

FULL_LR = 1e-6  # of full fine-tuning, as in our presets
TINY_FULL_LR = 2e-4
SEPARATE = "placement.trainer_devices placement.rollout_devices"
CLIPS = ("ppo", "cispo", "dppo")  # objectives
CLIP = "algorithm.clip_low algorithm.clip_high"
RATIO = f"{CLIP} algorithm.dual_clip algorithm.ratio"
BANDS = (Correction.icepop, Correction.sequence_mask)
FRAMING = "data.system data.prefix data.suffix"
ENGINES = "rollout.engine_args device.engine_args rollout.memory_fraction rollout.port"


def _rules(run: RunConfig) -> list[tuple[bool, str, str]]:
    """Return whether settings, or sections and mappings with all of theirs, have no effect in this run, and why."""
    algorithm = run.algorithm
    # π_old is always the current policy
    ratio_is_one = algorithm.old_policy is OldPolicy.trainer and algorithm.updates_per_step == 1
    correction = f"the correction is {run.correction.name}"
    colocated = run.placement.colocated
    refills = algorithm.dynamic_sampling or run.environment.multi_turn
    shares = run.shared_devices and run.device.kind is not DeviceKind.cpu
    return [
        (ratio_is_one, RATIO, "with algorithm.updates_per_step=1 the ratio is 1"),
        (algorithm.objective not in CLIPS, CLIP, f"algorithm.objective={algorithm.objective} has no clip"),
        (not ratio_is_one and algorithm.objective != "ppo", "algorithm.dual_clip", "algorithm.objective is not ppo"),
        (algorithm.advantage != "grpo", "algorithm.normalize_by_std", "algorithm.advantage is not grpo"),
        (not refills, "algorithm.max_refill_rounds", "algorithm.dynamic_sampling is false"),
        (run.correction is Correction.none, "algorithm.correction_high", correction),
        (run.correction not in BANDS, "algorithm.correction_low", correction),
        (not algorithm.overlong_buffer_fraction, "algorithm.overlong_penalty", "overlong_buffer_fraction is 0"),
        (run.data.demonstrations is None, "algorithm.demonstrations_per_step", "data.demonstrations is null"),
        (not run.teacher.given, "teacher", "there is no teacher: give teacher.path or teacher.urls"),
        (run.checkpoint.keep == 0, "checkpoint.every checkpoint.keep_best", "checkpoint.keep is 0"),
        (run.eval.temperature == 0, "eval.top_p eval.top_k", "eval.temperature is 0, which is greedy"),
        (run.eval.every >= run.steps, "stop", "the run is evaluated after its last step only"),
        (run.data.template is Template.plain, "data.thinking", "data.template is plain"),
        (run.environment.kind is EnvironmentKind.verifiers, FRAMING, "the environment writes its own prompts"),
        (not run.environment.multi_turn, "environment", "environment=single_turn has no episodes"),
        (not run.model.lora.enabled, "model.lora.alpha model.lora.targets", "model.lora.rank is 0"),
        (run.trainer.schedule is Schedule.constant, "trainer.lr_min_fraction", "trainer.schedule is constant"),
        (not shares, "offload.engine offload.trainer", "trainer and engines share no accelerator"),
        (run.weight_sync.mode is SyncMode.full, "weight_sync.snapshot", "weight_sync.mode is full"),
        (colocated, SEPARATE, "placement=colocate has placement.devices"),
        (not colocated, "placement.devices", f"placement=fully_async has {SEPARATE.replace(' ', ' and ')}"),
        (bool(run.rollout.urls), ENGINES, "rollout.urls names servers that are running"),
    ]


def idle_settings(run: RunConfig, given: Collection[str]) -> list[str]:
    """Return a sentence on each of the `given` settings without effect, and on what keeps this run from learning."""
    algorithm, default = run.algorithm, AlgorithmConfig()
    changed = {each.name for each in fields(algorithm) if getattr(algorithm, each.name) != getattr(default, each.name)}
    chosen = {key for key in given if "." in key} | {f"algorithm.{name}" for name in changed}
    sentences = []
    for idle, keys, why in _rules(run):
        named = tuple(f"{each}." for each in keys.split())
        unused = sorted(key for key in chosen if f"{key}.".startswith(named))
        if idle and unused:
            sentences.append(f"{', '.join(unused)}: no effect, since {why}")
    return [*sentences, *_learns_something_else(run, given)]


def _learns_something_else(run: RunConfig, given: Collection[str]) -> Iterator[str]:
    terms = run.reward.terms()
    named = {key.split(".")[2] for key in given if key.startswith("reward.components.")}
    own = [name for name, term in terms.items() if term.target is not None and name in named]
    preset = [name for name in terms if name not in named]
    if own and preset and "reward" not in given:
        removed = " ".join(f"~reward.components.{name}" for name in preset)
        yield f"the reward is {run.reward.formula}: {removed} takes out what a preset has beside {', '.join(own)}"

    if all(term.weight == 0 for term in terms.values()):
        yield "reward.components has weights of 0 only: every reward is 0, and nothing is learned"

    if run.trainer.warmup_steps >= run.optimizer_updates:
        yield (
            f"trainer.warmup_steps={run.trainer.warmup_steps} is all of the run's {run.optimizer_updates} optimizer "
            f"updates: the learning rate does not reach trainer.lr={run.trainer.lr:g} before the end"
        )
    if run.algorithm.needs_reference and not run.algorithm.kl_coefficient:
        yield f"algorithm.kl={run.algorithm.kl.name} is measured only: algorithm.kl_coefficient is 0"
    if outside := [step for step in run.trainer.profile_steps if not 1 <= step <= run.steps]:
        yield f"trainer.profile_steps={outside}: the run has steps 1 to {run.steps}"
    full = TINY_FULL_LR if run.model.name in TINY_PRESETS else FULL_LR
    if run.model.lora.enabled and run.trainer.peak_lr <= 2 * full:
        yield (
            f"trainer.lr={run.trainer.lr:g} is a rate for full fine-tuning: adapters need about ten times as much, "
            "whatever their rank"
        )
    if run.model.lora.path is not None and run.algorithm.needs_reference:
        yield (
            "the reference of algorithm.kl is the model without the adapter of model.lora.path: the KL does not begin "
            "at 0; mode=export merges the adapter into a model to start from"
        )
