"""Warnings for settings that have no effect, and for runs that cannot learn.

A preset may set what acts in most runs only (`eval.every=20`, in a run of three steps), so the rules name settings of
the command line, and of the algorithm those without their default.
"""

from collections.abc import Collection, Iterator
from dataclasses import fields

from app.config.algorithm import AlgorithmConfig, Correction
from app.config.data import Template
from app.config.model import TINY_PRESETS
from app.config.placement import PlacementKind
from app.config.run import RunConfig

FULL_LR = 1e-6  # of full fine-tuning, as in our presets
TINY_FULL_LR = 2e-4
PAIR = "placement.trainer_devices placement.rollout_devices"
RATIO = "algorithm.clip_low algorithm.clip_high algorithm.dual_clip algorithm.ratio"
CUTS = "eval.top_p eval.top_k"
ENGINES = "rollout.engine_args device.engine_args rollout.memory_fraction rollout.port"
CORRECTIONS = {
    Correction.tis: "algorithm.tis_max",
    Correction.icepop: "algorithm.icepop_low algorithm.icepop_high",
    Correction.kpop: "algorithm.kpop_threshold",
    Correction.sequence_mask: "algorithm.sequence_mask_low algorithm.sequence_mask_high",
}


def _idle(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield settings, or sections and mappings with all of theirs, that have no effect in this run, and why."""
    algorithm = run.algorithm
    if algorithm.ratio_is_one:
        yield RATIO, "with algorithm.updates_per_step=1 the ratio is 1"
    elif algorithm.objective not in ("ppo", "cispo", "dppo"):
        yield "algorithm.clip_low algorithm.clip_high", f"algorithm.objective={algorithm.objective} has no clip"
    for correction, keys in CORRECTIONS.items():
        if run.correction is not correction:
            yield keys, f"the correction is {run.correction.name}"
    if algorithm.overlong_buffer_fraction == 0:
        yield "algorithm.overlong_penalty", "algorithm.overlong_buffer_fraction is 0"
    if run.data.demonstrations is None:
        yield "algorithm.demonstrations_per_step", "data.demonstrations is null"
    if not run.teacher.given:
        yield "teacher", "there is no teacher: give teacher.path, teacher.urls or teacher.prompt"
    if all(step > run.steps for step in run.trainer.profile_steps):
        yield "trainer.profile_steps", "the run has fewer steps"
    if run.checkpoint.keep == 0:
        yield "checkpoint.every checkpoint.keep_best", "checkpoint.keep is 0"
    if run.eval.temperature == 0:
        yield CUTS, "eval.temperature is 0, which is greedy"
    if run.eval.every >= run.steps:
        yield "stop", "the run is evaluated after its last step only"
    if run.data.template is Template.plain:
        yield "data.thinking", "data.template is plain"
    if not run.environment.multi_turn:
        yield "environment", "environment=single_turn has no episodes"
    if not run.model.lora.enabled:
        yield "model.lora.alpha model.lora.targets", "model.lora.rank is 0"
    if run.placement.kind is PlacementKind.colocate:
        yield PAIR, "placement=colocate has placement.devices"
    else:
        yield "placement.devices", f"placement=fully_async has {PAIR.replace(' ', ' and ')}"
    if run.rollout.urls:
        yield ENGINES, "rollout.urls names servers that are running"


def idle_settings(run: RunConfig, given: Collection[str]) -> list[str]:
    """Return a sentence on settings without effect, and on each reason that keeps this run from learning.

    Args:
        run: A valid configuration.
        given: Names of the settings on the command line.
    """
    algorithm, default = run.algorithm, AlgorithmConfig()
    changed = {each.name for each in fields(algorithm) if getattr(algorithm, each.name) != getattr(default, each.name)}
    chosen = {key for key in given if "." in key} | {f"algorithm.{name}" for name in changed}
    sentences = []
    for keys, why in _idle(run):
        named = tuple(f"{each}." for each in keys.split())
        if idle := sorted(key for key in chosen if f"{key}.".startswith(named)):
            sentences.append(f"{', '.join(idle)}: no effect, since {why}")
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
