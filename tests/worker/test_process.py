"""The end of a worker with its parent."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

from tests.environment.pools import PATIENCE_S, Maker
from tests.waiting import alive, until

HANGING = "class Env:\n    async def begin(self, task): __import__('time').sleep(1e6)\n    def step(self, reply): ..."
ROOT = Path(__file__).parents[2]


def test_a_worker_dies_with_its_parent_and_ignores_its_ctrl_c(own: Maker, tmp_path: Path) -> None:
    spec = own(HANGING)
    driver = f"""
        import asyncio
        from app.environment.pool import EnvironmentPool
        from app.environment.pool import EnvironmentSpec
        from app.environment.wire import Limits, RendererChoice
        from tests.environment.pools import a_task

        async def main():
            spec = EnvironmentSpec({dict(spec.environment)!r}, {spec.renderer!r}, {spec.limits!r})
            pool = EnvironmentPool(spec, workers=2, episodes=2, log=None, warn=print)
            await pool.start()
            await pool.begin(a_task(), [1])
            print(*pool.pids, flush=True)
            await asyncio.sleep(1e6)

        import signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(driver)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(workers) == 2

        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
        assert all(worker.is_running() for worker in workers)

        process.kill()
        until(lambda: not any(map(alive, workers)), PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
