"""`mode=eval`: run the evaluation sets once, without a trainer, on a model or on a checkpoint of a run.

A checkpoint is exported into the evaluation's own folder and served from there; the run's folder is only read. Of
adapters (`model.lora`) the merged model is evaluated, as a user of the export would run it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from app.checkpoint.export import export_checkpoint
from app.checkpoint.run_state import read_state
from app.config import RunConfig
from app.device import device_of
from app.errors import expect
from app.eval import evaluate
from app.mode import ModeResult
from app.mode.export import source_of
from app.model.architecture import architecture_of
from app.placement.watchdog import watchdog
from app.start.inputs import RunInputs
from app.start.session import start_rollout_workers
from app.tracking.recorder import RunFolderRecorder
from app.utils import files
from app.utils.tasks import run_to_end, until_signal

WEIGHTS = "model"  # in the evaluation's folder while it runs: the exported checkpoint


def run(config: RunConfig, folder: Path, inputs: RunInputs) -> ModeResult:
    """Evaluate the checkpoint of `resume=`, or else the model; the metric is the mean accuracy over the sets."""
    with RunFolderRecorder(config, folder) as recorder:
        return ModeResult(asyncio.run(until_signal(_evaluate(config, folder, inputs, recorder))))


async def _evaluate(config: RunConfig, folder: Path, inputs: RunInputs, recorder: RunFolderRecorder) -> float:
    from app.mode.plan.memory import with_inflight_groups

    config = with_inflight_groups(config, device_of(config.device.kind), architecture_of(config.model))
    async with (
        subject_of(config, folder, inputs.checkpoint, recorder) as (step, weights),
        start_rollout_workers(config, folder, inputs, recorder, weights=weights) as workers,
    ):
        await workers.start_engines()
        async with workers.supervisor.monitor(), watchdog(workers.rollouter, workers.pool, config, folder):
            sets = workers.inputs.prompts.evals
            results, groups = await evaluate(workers.rollouter, sets, config, version=step)
        recorder.log_eval(step, results, groups, workers.rollouter.tokenizer.decode)
    return sum(metrics["accuracy"] for metrics in results.values()) / len(results)


@asynccontextmanager
async def subject_of(
    config: RunConfig, folder: Path, checkpoint: Path | None, recorder: RunFolderRecorder
) -> AsyncIterator[tuple[int, Path | None]]:
    """Record what is evaluated. A checkpoint is exported to `model/` in `folder`, and the export deleted afterwards.

    Yields the step of the checkpoint and its export; for the model of `model=`, 0 and None.
    """
    if checkpoint is None:
        model = str(config.model.path)
        recorder.note(f"evaluating {model}", {"evaluated/model": model})
        yield 0, None
        return

    servers = config.rollout.urls
    expect(not servers, "rollout.urls", servers, "[] with resume=…: running servers keep the weights that they have")
    state = read_state(checkpoint)
    recorder.note(
        f"evaluating step {state.step}: {checkpoint}",
        {"evaluated/checkpoint": str(checkpoint), "evaluated/step": state.step},
    )

    recorder.status("exporting the checkpoint")
    weights = folder / WEIGHTS
    try:
        await run_to_end(export_checkpoint, checkpoint, source_of(config, state), weights)
        yield state.step, weights
    finally:
        files.remove(weights)
