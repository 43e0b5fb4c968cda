"""`mode=eval`: run the evaluation sets once, without a trainer."""

import asyncio
from pathlib import Path

from app.config import RunConfig
from app.device import device_of
from app.eval.evaluate import evaluate
from app.mode import ModeResult
from app.mode.session import start_rollout_workers
from app.placement.watchdog import watchdog
from app.recovery.resume import run_lock
from app.tracking.recorder import RunFolderRecorder
from app.utils.tasks import gather_or_raise, until_signal


def run(config: RunConfig, folder: Path) -> ModeResult:
    """Evaluate the model; the metric is the mean accuracy over the sets."""
    with run_lock(folder), RunFolderRecorder(config, folder) as recorder:
        return ModeResult(asyncio.run(until_signal(_evaluate(config, folder, recorder))))


async def _evaluate(config: RunConfig, folder: Path, recorder: RunFolderRecorder) -> float:
    async with start_rollout_workers(config, device_of(config.device.kind), folder, recorder) as workers:
        await gather_or_raise(*workers.engine_starts())
        async with workers.supervisor.monitor(), watchdog(workers.rollouter, workers.pool, config, folder):
            results, groups = await evaluate(workers.rollouter, workers.inputs.prompts.evals, config, version=0)
        recorder.log_eval(0, results, groups, workers.rollouter.tokenizer.decode)
    return sum(metrics["accuracy"] for metrics in results.values()) / len(results)
