"""Evaluation on the held-out sets, with one policy version throughout."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from app.algorithm.metrics import correct, group_metrics
from app.config import RunConfig
from app.config.eval import EvalConfig
from app.errors import RunError
from app.rollout.rollouter import Rollouter
from app.types import Group, Prompt, Sampling

REPORTED = {  # metric of an evaluation → metric of `group_metrics`
    "accuracy": "reward/accuracy",
    "reward": "reward/mean",
    "length_mean": "completion/length_mean",
    "truncated_fraction": "completion/truncated_fraction",
}


def is_due(config: EvalConfig, *, step: int, last_step: int) -> bool:
    """Whether to evaluate after a step. Step 0 is the model before training.

    >>> [step for step in range(8) if is_due(EvalConfig(every=3, before_train=True), step=step, last_step=7)]
    [0, 3, 6, 7]
    """
    if step == 0:
        return config.before_train
    return step >= last_step or (config.every > 0 and step % config.every == 0)


async def evaluate(
    rollouter: Rollouter, sets: Mapping[str, Sequence[Prompt]], config: RunConfig, version: int
) -> tuple[dict[str, dict[str, float]], list[Group]]:
    """Return the metrics of each set and the groups of all sets.

    No weight sync may begin meanwhile, so that one policy version samples every completion. Training completions may
    be in flight: they slow the evaluation down and do not change it.
    """
    settings, rollout = config.eval, config.rollout
    stop = tuple(rollout.stop)
    sampling = Sampling(settings.temperature, settings.top_p, rollout.max_completion_tokens, settings.top_k, stop)
    # as many completions in flight as in training, where staleness may be the tighter bound
    in_training = rollout.max_inflight_groups or config.groups_in_flight
    limit = max(1, in_training * config.algorithm.group_size // settings.samples)

    metrics: dict[str, dict[str, float]] = {}
    all_groups: list[Group] = []
    for name, prompts in sets.items():
        played = await rollouter.groups(
            prompts, size=settings.samples, sampling=sampling, version=version, limit=limit, training=False
        )
        groups = [group for group in played if group.trajectories]
        if not groups:
            raise RunError(f"every episode of evaluation set {name} failed: see logs/environment.log")
        metrics[name] = measure(groups)
        all_groups += groups
    return metrics, all_groups


def measure(groups: Sequence[Group]) -> dict[str, float]:
    """Measure the groups of an evaluation set.

    Returns:
        Accuracy, mean reward and length, and truncated fraction over completions; pass@k for k of at least 2; the
        number of prompts; and the accuracy's standard error over prompts, since the completions of one prompt are not
        independent. A single prompt has no standard error.
    """
    metrics = group_metrics(groups)
    passes = {name.removeprefix("reward/"): value for name, value in metrics.items() if name.startswith("reward/pass@")}
    passes.pop("pass@1")  # equals the accuracy
    measured = {name: metrics[source] for name, source in REPORTED.items()}

    accuracies = [fmean(map(correct, group.trajectories)) for group in groups]
    if len(groups) > 1:
        measured["accuracy_stderr"] = stdev(accuracies) / math.sqrt(len(groups))
    return {**measured, "prompts": len(groups), **passes}
