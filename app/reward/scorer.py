"""Score trajectories: the weighted sum of the reward components, computed where nothing can hang or kill the run.

    trajectories ─┬─ in-process components (exact, format) ────────────────────────────────────┬─→ reward,
                  └─ each other component → a free one of its worker processes, killed on timeout ┘   reward_components

Invariants:
- Every trajectory gets a finite reward. A failed one gets 0 and its failure is counted.
- A component that returns None for a trajectory is left out of its sum; a trajectory without any component has failed.
- Once more than `max_failed_fraction` of a step's trajectories have failed, scoring raises a `RunError`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from app.config.reward import CODE, RewardConfig
from app.errors import ConfigError, RunError
from app.reward.component import Failure, FailureKind, LoggedScore, Outcome, RewardComponent, Value, built_in, evaluate
from app.reward.reward_pool import RewardPool
from app.types import Trajectory
from app.utils.tasks import gather_or_raise
from app.utils.user_code import LoadError
from app.worker.failures import FailureWindow

LOADABLE = "a function or class that can be called with trajectories"
run_log = logging.getLogger("app.run")

Values = list[dict[str, Value]]  # per trajectory, by component name
NONE_APPLIES = Failure(FailureKind.value, "every component returned None: no reward applies to the trajectory")


class Scorer:
    """Scores trajectories with the configured components; any number of `score` calls may be in flight.

        scorer = Scorer(config.reward, step_trajectories=128, log=folder / "logs/reward.log", warn=recorder.warn)
        await scorer.start()
        scored = await scorer.score(trajectories)  # reward and reward_components filled in
        scorer.check()                             # at the end of each step
        scorer.close()

    Failures are counted over `step_trajectories`. The workers' output goes to the file `log` (None: stderr).
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        step_trajectories: int = 128,
        log: Path | None = None,
        warn: Callable[[str], None] = run_log.warning,
    ) -> None:
        limit = config.max_failed_fraction
        key = "reward.max_failed_fraction"
        consequence = (
            f"A failed trajectory scores 0; above {key}={limit:g} of a step the run stops. All failures are in "
            "logs/reward.log."
        )
        kinds = Counter({kind.name: 0 for kind in FailureKind})
        self._failures = FailureWindow("trajectories failed", key, limit, step_trajectories, consequence, warn, kinds)
        self._components = components_of(config)
        in_process = [component for component in self._components if not component.isolated]
        self._in_process = {each.name: each.load() for each in in_process}
        self.pools = [
            RewardPool(component, workers=config.workers, timeout_s=config.timeout_s, log=log, warn=warn)
            for component in self._components
            if component.isolated
        ]

    async def start(self) -> None:
        """Start all workers in the background, but wait for custom rewards: `ConfigError` if one cannot be loaded."""
        starts = [(pool.component, pool.start_workers()) for pool in self.pools]
        for component, workers in starts:
            if component.key is None:
                continue
            try:
                await workers
            except (LoadError, OSError, RunError) as error:
                self.close()
                raise not_accepted(component, str(error)) from error

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the same trajectories, in order, with `reward` and `reward_components` (unweighted) filled in.

        A custom reward is called once per run of consecutive trajectories that share a prompt. Components are called
        concurrently. Raises `RunError` if too large a fraction of a step's trajectories has failed.
        """
        values: Values = [{} for _ in trajectories]
        for name, reward in self._in_process.items():
            _record(values, name, evaluate(reward, trajectories, None))

        async def score_chunk(pool: RewardPool, chunk: slice) -> None:
            _record(values[chunk], pool.component.name, await pool.score(trajectories[chunk]))
            self._count([each for each in values[chunk] if len(each) == len(self._components)])  # with all their values

        if self.pools:
            chunks = [(pool, _chunks(trajectories, pool.component.per_trajectory)) for pool in self.pools]
            await gather_or_raise(*(score_chunk(pool, chunk) for pool, of_pool in chunks for chunk in of_pool))
        else:
            self._count(values)
        return [self._with_reward(trajectory, scores) for trajectory, scores in zip(trajectories, values, strict=True)]

    def check(self) -> None:
        """Check the failures at the end of a step, even one with fewer than `step_trajectories`; raises `RunError`."""
        self._failures.end_window()

    @property
    def metrics(self) -> dict[str, float]:
        """`reward/failed_*` by kind and `reward/retried`, in trajectories so far; `reward/failed_fraction`."""
        retried = sum(pool.retried for pool in self.pools)
        return {**self._failures.metrics, "reward/retried": float(retried)}

    def close(self) -> None:
        """Stop the workers. Calls of `score` in flight end with failures."""
        for pool in self.pools:
            pool.close()

    def _count(self, values: Values) -> None:
        for by_component in values:
            if all(value is None for value in by_component.values()):
                by_component[self._components[-1].name] = NONE_APPLIES
            failed = {name: value for name, value in by_component.items() if isinstance(value, Failure)}
            for name, failure in failed.items():
                self._failures.warn(name, f"reward component {name}", str(failure))
            if failed:
                name, failure = next(iter(failed.items()))
                self._failures.by_kind[failure.kind.name] += 1
            self._failures.count(f"component {name}, {failure}" if failed else None)

    def _with_reward(self, trajectory: Trajectory, values: dict[str, Value]) -> Trajectory:
        scores: dict[str, float] = {}
        total = 0.0
        failed = False
        for component in self._components:
            value = values[component.name]
            if value is None:
                continue
            if isinstance(value, LoggedScore):
                scores |= {f"{component.name}/{name}": number for name, number in value.logged.items()}
                value = value.score
            if isinstance(value, Failure):
                failed = True
                value = 0.0
            scores[component.name] = value
            total += component.weight * value

        return replace(trajectory, reward=0.0 if failed else total, reward_components=scores)


def components_of(config: RewardConfig) -> list[RewardComponent]:
    """Return the components of the weighted sum."""
    components = []
    for name, term in config.terms().items():
        if term.target is None:
            args = {**term.args, "timeout_s": config.timeout_s} if name == CODE else {}
            components.append(built_in(name, term.weight, args))
        else:
            key = "reward._target_" if config._target_ is not None else f"reward.components.{name}._target_"
            components.append(RewardComponent(name, term.weight, term.target, term.args, key))
    return components


def not_accepted(component: RewardComponent, why: str, accepted: str = LOADABLE) -> ConfigError:
    """Return the error of a custom reward."""
    return ConfigError(str(component.key), component.target, accepted, why)


def _chunks(trajectories: Sequence[Trajectory], per_trajectory: bool) -> Iterator[slice]:
    """Yield runs of one prompt's trajectories, or single trajectories, which spread over all workers."""
    lengths = [len(list(run)) for _, run in groupby(trajectories, key=lambda trajectory: trajectory.prompt.id)]
    start = 0
    for size in [1] * len(trajectories) if per_trajectory else lengths:
        yield slice(start, start + size)
        start += size


def _record(values: Values, name: str, outcome: Outcome) -> None:
    """Fill in the outcome of one component. The dictionaries are shared with the caller's list."""
    results = [outcome] * len(values) if isinstance(outcome, Failure) else outcome
    for by_component, value in zip(values, results, strict=True):
        by_component[name] = value
