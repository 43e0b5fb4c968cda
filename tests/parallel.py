"""Who runs what with `pytest -n 2`: a file stays whole, and all that use the session's Ray and server go to one worker.

Those go first, then the other files that take long, so that no worker is left with one of them at the end.
"""

from xdist.scheduler import LoadScopeScheduling

RAY: tuple[str, ...] = ("cluster/test_actors.py", "cluster/test_reservation.py", "cpu_engine/", "offload/", "rollout/")
RAY += ("trainer/test_start.py", "weight_sync/")
LONG: tuple[str, ...] = (
    "recovery/test_recovery_runs.py",
    "mode/test_environment_runs.py",
    "mode/test_train.py",
    "test_bad_input.py",
)
LONG += ("standin/", "config/", "docs/")


class WholeFiles(LoadScopeScheduling):
    """Hands files to workers as these have time, the longest first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if _in(file, RAY) else file

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False  # by the number of tests, which says nothing of their time
        super().schedule()

    def _assign_work_unit(self, node: object) -> None:
        first = min(self.workqueue, key=_rank)
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def _rank(unit: str) -> int:
    if unit == "ray":
        return 0
    return next((place for place, name in enumerate(LONG, 1) if _in(unit, (name,))), len(LONG) + 1)


def _in(file: str, names: tuple[str, ...]) -> bool:
    return file.removeprefix("tests/").startswith(names)
