"""Who runs what with `pytest -n 2`: a file stays whole, and all that use the session's Ray and server go to one worker.

Those go first, then the other files that take long, so that no worker is left with one of them at the end.
"""

from xdist.scheduler import LoadScopeScheduling

RAY: tuple[str, ...] = (  # with a test that uses the fixture `ray_session`, which names one that is missing here
    "cluster/test_engine_factory.py",
    "cluster/test_reservation.py",
    "cpu_engine/test_batched_attention.py",
    "offload/",
    "rollout/test_adapters_engine.py",
    "rollout/test_client.py",
    "rollout/test_death.py",
    "rollout/test_derived_weights.py",
    "rollout/test_engine.py",
    "rollout/test_episodes_engine.py",
    "rollout/test_qwen35.py",
    "rollout/test_remote.py",
    "rollout/test_shared_prompts.py",
    "teacher/test_own_engine.py",
    "trainer/test_start.py",
    "weight_sync/adapters/",
    "weight_sync/test_collective.py",
    "weight_sync/test_delta_push.py",
    "weight_sync/test_episodes_push.py",
    "weight_sync/test_faults.py",
    "weight_sync/test_released_engine.py",
    "weight_sync/test_synchronizer.py",
)
LONG: tuple[str, ...] = (  # more than ten seconds, the longest first
    "mode/test_sft.py",
    "test_bad_input.py",
    "mode/test_eval.py",
    "mode/test_train.py",
    "recovery/test_recovery_runs.py",
    "mode/test_environment_runs.py",
    "cpu_engine/test_fork_server.py",
    "start/test_output_folder.py",
    "reward/test_scorer.py",
    "standin/",
    "recovery/test_resume.py",
    "config/",
    "docs/",
    "mode/",
    "weight_sync/test_world_size.py",
    "real_stack/",
    "launch/",
    "reward/",
    "tracking/",
    "teacher/",
    "environment/",
)


class WholeFiles(LoadScopeScheduling):
    """Hands files to workers as these have time, the longest first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if uses_ray(file) else file

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False  # by the number of tests, which says nothing of their time
        super().schedule()

    def _assign_work_unit(self, node: object) -> None:
        first = min(self.workqueue, key=_rank)
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def uses_ray(file: str) -> bool:
    """Whether a test file is one of those that share the session's Ray."""
    return file.removeprefix("tests/").startswith(RAY)


def _rank(unit: str) -> int:
    if unit == "ray":
        return 0
    file = unit.removeprefix("tests/")
    return next((place for place, name in enumerate(LONG, 1) if file.startswith(name)), len(LONG) + 1)
