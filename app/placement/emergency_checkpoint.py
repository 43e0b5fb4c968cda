"""The checkpoint of the last finished step of a run that a signal or a failure ends, within `checkpoint.grace_s`."""

import asyncio

from app.errors import RunError, TrainerError
from app.placement.controller import PlacementController


async def save_last_step(controller: PlacementController) -> None:
    """Abort the open step and save the last finished one, unless it is saved.

    Takes at most `checkpoint.grace_s` and the time that the trainer's current microbatch needs: two of the longest so
    far, since on an accelerator another one may be queued. Warns if the step could not be saved. A cancellation ends
    the attempt, and is raised after the warning.
    """
    config = controller.config.checkpoint
    reason = "an unexpected error"
    try:
        async with asyncio.timeout(config.grace_s + 2 * controller.microbatch_s):
            await _save_last_step(controller)
    except TimeoutError:
        reason = f"checkpoint.grace_s={config.grace_s:g} s passed during: {controller.current_phase}"
    except RunError as error:
        reason = str(error)
    except asyncio.CancelledError:
        reason = f"a further signal arrived during: {controller.current_phase}"
        raise
    finally:
        checkpoints = controller.context.checkpoints
        await checkpoints.settle(0)
        if config.keep and controller.version not in (0, checkpoints.committed_step):
            controller.context.recorder.warn(f"step {controller.version} was not saved: {reason}")


async def _save_last_step(controller: PlacementController) -> None:
    context, checkpoints = controller.context, controller.context.checkpoints

    # Also if there is nothing to save: busy ranks could not free what a weight sync holds.
    controller.current_phase = "aborting the open step"
    try:
        await context.trainer.abort_step()
    except TrainerError:
        await checkpoints.wait()  # ranks that cannot abort may still finish a checkpoint
        raise
    if not controller.config.checkpoint.keep:
        return

    controller.current_phase = "writing the checkpoint before"
    await checkpoints.wait()
    controller.current_phase = "recording the last step"
    await controller.commit_finished()
    if controller.version in (0, checkpoints.committed_step):
        return

    context.recorder.status(f"saving step {controller.version}")
    controller.current_phase = "capturing the state"
    await controller.save()
    controller.current_phase = "writing the checkpoint"
    await checkpoints.wait()
