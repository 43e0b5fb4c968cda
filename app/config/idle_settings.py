"""Sentences on settings that cannot act, or hardly act, in a combination.

A preset may set what acts in most runs only (`eval.every=20`, in a run of three steps), so the rules name settings of
the command line, and of the algorithm those without their default.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields

from app.config.algorithm import AlgorithmConfig, Correction
from app.config.data import Template
from app.config.placement import PlacementKind
from app.config.run import RunConfig
from app.config.trainer import Optimizer, Schedule

FULL_LR = 1e-6  # of full fine-tuning, as in our presets
TINY_FULL_LR = 2e-4
RATIO_IS_ONE = "with algorithm.updates_per_step=1 the ratio is 1"


@dataclass(frozen=True, slots=True)
class Rule:
    """When settings have no effect."""

    keys: tuple[str, ...]  # settings, or sections and mappings with all of theirs
    why: str
    applies: Callable[[RunConfig], bool]


RULES = (
    Rule(
        ("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip", "algorithm.ratio"),
        RATIO_IS_ONE,
        lambda run: run.algorithm.ratio_is_one,
    ),
    Rule(("algorithm.tis_max",), "the correction is not tis", lambda run: run.correction is not Correction.tis),
    Rule(
        ("algorithm.icepop_low", "algorithm.icepop_high"),
        "algorithm.correction is not icepop",
        lambda run: run.correction is not Correction.icepop,
    ),
    Rule(
        ("algorithm.sequence_mask_low", "algorithm.sequence_mask_high"),
        "algorithm.correction is not sequence_mask",
        lambda run: run.correction is not Correction.sequence_mask,
    ),
    Rule(
        ("algorithm.overlong_penalty",),
        "algorithm.overlong_buffer_fraction is 0",
        lambda run: run.algorithm.overlong_buffer_fraction == 0,
    ),
    Rule(
        ("algorithm.max_refill_rounds",),
        "algorithm.dynamic_sampling is false",
        lambda run: not run.algorithm.dynamic_sampling,
    ),
    Rule(
        ("trainer.lr_min_fraction",),
        "trainer.schedule is constant",
        lambda run: run.trainer.schedule is Schedule.constant,
    ),
    Rule(
        ("trainer.beta1", "trainer.beta2"),
        "trainer.optimizer is sgd",
        lambda run: run.trainer.optimizer is Optimizer.sgd,
    ),
    Rule(
        ("trainer.profile_steps",),
        "the run has fewer steps",
        lambda run: all(step > run.steps for step in run.trainer.profile_steps),
    ),
    Rule(
        ("checkpoint.every", "checkpoint.keep_best"),
        "checkpoint.keep is 0",
        lambda run: run.checkpoint.keep == 0,
    ),
    Rule(("eval.top_p",), "eval.temperature is 0, which is greedy", lambda run: run.eval.temperature == 0),
    Rule(
        ("eval.every",),
        "the run has fewer steps, and is evaluated after the last one",
        lambda run: run.eval.every > run.steps,
    ),
    Rule(
        ("data.thinking",),
        "data.template is plain",
        lambda run: run.data.template is Template.plain,
    ),
    Rule(
        ("environment",),
        "environment=single_turn has no episodes",
        lambda run: not run.environment.multi_turn,
    ),
    Rule(
        ("model.lora.alpha", "model.lora.targets"),
        "model.lora.rank is 0",
        lambda run: not run.model.lora.enabled,
    ),
    Rule(
        ("placement.devices",),
        "placement=fully_async has placement.trainer_devices and placement.rollout_devices",
        lambda run: run.placement.kind is PlacementKind.fully_async,
    ),
    Rule(
        ("placement.trainer_devices", "placement.rollout_devices"),
        "placement=colocate has placement.devices",
        lambda run: run.placement.kind is PlacementKind.colocate,
    ),
    Rule(
        ("rollout.engine_args", "device.engine_args", "rollout.memory_fraction", "rollout.port"),
        "rollout.urls names servers that are running",
        lambda run: bool(run.rollout.urls),
    ),
)


def idle_settings(run: RunConfig, given: Collection[str]) -> list[str]:
    """Return a sentence for each rule that names settings of this run, and for what keeps it from learning.

    Args:
        run: A valid configuration.
        given: Names of the settings on the command line.
    """
    settings = {key for key in given if "." in key}  # without the choices of groups
    chosen = sorted(settings | {*_not_default(run.algorithm)})
    sentences = []
    for rule in RULES:
        idle = [key for key in chosen if key in rule.keys or key.startswith(tuple(f"{each}." for each in rule.keys))]
        if idle and rule.applies(run):
            sentences.append(f"{_listed(idle)} no effect: {rule.why}")
    return [*sentences, *_learns_nothing(run)]


def idle_clip(run: RunConfig) -> list[str]:
    """Return the sentence on a clip that nobody has set, which the plan has but no run."""
    chosen = {"algorithm.clip_low", "algorithm.clip_high"} & {*_not_default(run.algorithm)}
    if chosen or not run.algorithm.ratio_is_one:
        return []
    return [f"algorithm.clip_low and algorithm.clip_high have no effect: {RATIO_IS_ONE}"]


def _not_default(algorithm: AlgorithmConfig) -> list[str]:
    default = AlgorithmConfig()
    names = [each.name for each in fields(algorithm)]
    return [f"algorithm.{name}" for name in names if getattr(algorithm, name) != getattr(default, name)]


def _learns_nothing(run: RunConfig) -> Iterator[str]:
    if run.trainer.warmup_steps >= run.optimizer_updates:
        yield (
            f"trainer.warmup_steps={run.trainer.warmup_steps} is all of the run's {run.optimizer_updates} optimizer "
            f"updates: the learning rate does not reach trainer.lr={run.trainer.lr:g} before the end"
        )
    if all(term.weight == 0 for term in run.reward.terms().values()):
        yield "reward.components has weights of 0 only: every reward is 0, and nothing is learned"

    full = TINY_FULL_LR if run.model.path is None else FULL_LR
    if run.model.lora.enabled and run.trainer.lr <= 2 * full:
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
