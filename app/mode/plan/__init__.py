"""`mode=plan`: print device layout, batch sizes, memory, time, disk and engines. Needs no accelerator.

Nothing is downloaded, started or written, and neither torch nor Ray nor SGLang is imported.
"""

import sys
from collections.abc import Collection
from pathlib import Path

from app.config import RunConfig
from app.config.command_line import given_settings
from app.data import rows
from app.data.counts import describe_rows
from app.device import device_of
from app.errors import ConfigError
from app.mode import ModeResult
from app.mode.plan import text
from app.mode.plan.duration import step_tokens
from app.mode.plan.memory import with_inflight_groups
from app.mode.plan.remedies import remedies_of, splits_of
from app.model.architecture import Architecture, architecture_of, unknown_shapes
from app.rollout.engine.server_args import engine_flags
from app.start.idle_settings import idle_settings
from app.start.input_checks import sizes
from app.start.inputs import CheckStage, RunInputs
from app.start.preflight import problems
from app.tracking.number_format import plural


def run(config: RunConfig, _folder: Path | None) -> ModeResult:
    """Print the plan, and which inputs a run on this machine would refuse.

    Raises:
        ConfigError: The model and the settings of its preset do not go together.
    """
    inputs = RunInputs(config, CheckStage.plan)
    sizes(inputs)
    refused = problems(inputs)  # counts the steps of epochs
    sections = [describe(inputs.config, given_settings())]
    if refused:
        sections.append("\n  ".join(["A run on this machine would be refused", *refused.values()]))

    sys.stdout.write("\n\n".join(sections) + "\n")
    return ModeResult()


def describe(config: RunConfig, given: Collection[str] = ()) -> str:
    """Return the plan of a run. `given`: names of the settings on the command line."""
    device = device_of(config.device.kind)
    model = architecture_of(config.model)
    config = with_inflight_groups(config, device, model)
    flags = engine_flags(config, device)

    sections = [_devices(config), _batch(config, given), _rows(config)]
    if config.environment.multi_turn:
        sections.append(_episodes(config))
    if model is None:
        sections.append([f"Memory: {unknown_shapes(config.model)}"])
    else:
        sections += [
            text.memory(config, device, model, flags),
            text.sync(config, device, model),
            text.time(config, device, model),
            splits_of(config, device, model),
            text.disk(config, model),
            remedies_of(config, device, model),
        ]
    sections += [text.engines(config, device, flags), _schedule(config, model)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _devices(config: RunConfig) -> list[str]:
    placement = config.placement
    width = config.rollout.tensor_parallel
    kind = config.device.kind.name
    first_engine_device = 0 if placement.colocated else placement.trainer_ranks
    total = config.device_count
    first_teacher_device = total - config.teacher_devices

    lines = [f"{config.model.name} · {config.trained_by} · {placement.kind.name} on {total} {kind} device(s)"]
    for device in range(total):
        roles = []
        if device < placement.trainer_ranks:
            roles.append(f"trainer rank {device}")
        if device >= first_teacher_device:
            roles.append(f"teacher (tensor-parallel rank {device - first_teacher_device} of {config.teacher_devices})")
        elif device >= first_engine_device and config.engines and not config.rollout.urls:
            engine, rank = divmod(device - first_engine_device, width)
            roles.append(f"engine {engine} (tensor-parallel rank {rank} of {width})")
        lines.append(f"  {kind} {device}: {' + '.join(roles)}")

    if config.rollout.urls:
        return [*lines, *(f"  engine {index}: running at {url}" for index, url in enumerate(config.rollout.urls))]
    of_width = f" of {width} device(s)" if config.engines else ", this run samples nothing"
    return [*lines, f"  {config.engines} engine(s){of_width}"]


def _batch(config: RunConfig, given: Collection[str]) -> list[str]:
    algorithm = config.algorithm
    rollout = config.rollout
    trajectories = algorithm.trajectories_per_step
    # The work under one deadline.
    work = f"up to {step_tokens(config):,} tokens in {algorithm.updates_per_step} update(s)"
    syncs = ", one weight sync each" if config.engines else ""
    if config.stream:
        work = "the groups that have arrived"
    return [
        "A step",
        f"  {algorithm.prompts_per_step} prompts × {algorithm.group_size} completions = {trajectories} trajectories",
        f"  {algorithm.updates_per_step} optimizer update(s) of {algorithm.prompts_per_update} prompt(s) "
        f"= {algorithm.prompts_per_update * algorithm.group_size} trajectories",
        f"  a trajectory: up to {rollout.max_prompt_tokens} + {rollout.max_completion_tokens} "
        f"= {rollout.max_tokens} tokens; "
        f"a step: up to {trajectories * rollout.max_completion_tokens:,} completion tokens",
        f"  reward: {config.reward.formula}",
        f"  {trajectories / config.placement.trainer_ranks:g} trajectories per trainer rank, in microbatches of up to "
        f"{config.trainer.tokens_per_microbatch:,} tokens",
        *(f"  {sentence}" for sentence in idle_settings(config, given)),
        f"  one call to the trainer computes {work} within trainer.timeout_s={config.trainer.timeout_s:g} s",
        f"  {config.steps} steps = {config.steps * trajectories:,} trajectories{syncs}",
    ]


def _rows(config: RunConfig) -> list[str]:
    try:
        loaded = RunInputs(config, CheckStage.plan).rows if rows.sets_of(config.data).are_local else None
        lines = describe_rows(config.data, loaded, config.algorithm.prompts_per_step, config.steps)
    except ConfigError:
        return ["Data: refused, see the last lines"]
    if config.epochs is not None and loaded is None:
        lines.append(f"  a run counts the steps of epochs={config.epochs:g}; this plan is of {config.steps} steps")
    return lines


def _episodes(config: RunConfig) -> list[str]:
    """Return how many episodes the environment's workers run at a time, and how long one may be."""
    settings = config.environment
    rollout = config.rollout
    groups, size = config.groups_in_flight, config.algorithm.group_size
    concurrent = settings.workers * settings.episodes
    waiting = "; the others wait: raise environment.episodes or environment.workers" * (concurrent < groups * size)
    where = "" if settings.python is None else f" of {settings.python}"
    return [
        f"Episodes of {settings._target_ or settings.kind.name}",
        f"  {plural(settings.workers, 'worker process', 'worker processes')}{where}, which may allocate "
        f"{settings.memory_gib:g} GiB each, beside the driver",
        f"  {concurrent} episodes at once ({settings.workers} × environment.episodes={settings.episodes}); the run "
        f"keeps up to {groups} groups × {size} = {groups * size} in flight{waiting}",
        f"  an episode: up to {plural(settings.max_turns, 'turn')} with rollout.max_completion_tokens="
        f"{rollout.max_completion_tokens} in total, observations included",
        f"  its longest sequence: {rollout.max_tokens} tokens",
    ]


def _schedule(config: RunConfig, model: Architecture | None) -> list[str]:
    placement = config.placement
    colocated = placement.colocated
    turns = "Schedule: generate, train and sync take turns"
    if colocated and placement.max_staleness == 0:
        return [f"{turns}; every trajectory is on-policy"]

    buffer = (placement.max_staleness + 1) * config.algorithm.prompts_per_step
    mode = placement.in_flight_or_default(keeps_cache=model is not None and model.linear is None)
    in_flight = "each request keeps its adapter" if config.model.lora.enabled else mode.name
    return [
        f"{turns}; rollouts are partial" if colocated else "Schedule: generation and training run at the same time",
        f"  staleness at most {placement.max_staleness} sync(s); in flight at a sync: {in_flight}",
        f"  groups are trained {'as they arrive' if config.stream else 'once the step is complete'}",
        f"  buffer of {buffer} groups; correction: {config.correction.name}",
    ]
