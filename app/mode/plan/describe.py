"""`mode=plan`: what a run would do, on any machine and without starting anything.

Who sits on which device, the batch arithmetic, memory per role and phase, an engine's command line, a push's size.
Always holds: nothing is fetched, started or written, and neither torch nor Ray nor SGLang is imported.
"""

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.device import device_of
from app.mode.plan import text as plan_text
from app.mode.plan.memory import devices
from app.model.architecture import architecture_of
from app.rollout.server_args import engine_flags


def describe(config: RunConfig) -> str:
    """The plan as text."""
    device, model = device_of(config.device.kind), architecture_of(config.model)
    flags = engine_flags(config, device)
    sections = [_devices(config), _batch(config)]
    if model is None:
        unknown = f"Memory: model.path={config.model.path} is not here, or not a dense decoder; give a local directory"
        sections.append([unknown])
    else:
        sections += [plan_text.memory(config, device, model, flags), plan_text.push(config, device, model)]
    sections += [plan_text.engines(config, device, flags), _step(config)]
    return "\n\n".join("\n".join(section) for section in sections)


def _devices(config: RunConfig) -> list[str]:
    placement, width = config.placement, config.rollout.tensor_parallel
    kind, ranks, engines = config.device.kind.name, placement.trainer_ranks, config.engines
    colocate = placement.kind is PlacementKind.colocate
    total = devices(config)
    lines = [f"{config.model.name} · {config.algorithm.name} · {placement.kind.name} on {total} {kind} device(s)"]
    for device in range(total):
        roles = []
        if device < ranks:
            roles.append(f"trainer rank {device}")
        slot = device if colocate else device - ranks
        if slot >= 0 and not config.rollout.urls:
            roles.append(f"engine {slot // width} (tensor-parallel rank {slot % width} of {width})")
        lines.append(f"  {kind} {device}: {' + '.join(roles)}")
    if config.rollout.urls:
        lines += [f"  engine {index}: runs already at {url}" for index, url in enumerate(config.rollout.urls)]
    else:
        lines.append(f"  {engines} engine(s) of {width} device(s)")
    return lines


def _batch(config: RunConfig) -> list[str]:
    algorithm, rollout = config.algorithm, config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    trajectories, ranks = algorithm.trajectories_per_step, config.placement.trainer_ranks
    completion_tokens = trajectories * rollout.max_completion_tokens
    return [
        "A step",
        f"  {algorithm.prompts_per_step} prompts × {algorithm.group_size} completions = {trajectories} trajectories",
        f"  {algorithm.updates_per_step} optimizer update(s) of {algorithm.prompts_per_update} prompts "
        f"= {algorithm.prompts_per_update * algorithm.group_size} trajectories",
        f"  a trajectory: up to {rollout.max_prompt_tokens} + {rollout.max_completion_tokens} = {longest} tokens; "
        f"a step: up to {completion_tokens:,} completion tokens",
        f"  {trajectories / ranks:g} trajectories a trainer rank, in microbatches of up to "
        f"{config.trainer.tokens_per_microbatch:,} tokens",
        f"  {config.steps} steps = {config.steps * trajectories:,} trajectories, one push each",
    ]


def _step(config: RunConfig) -> list[str]:
    placement = config.placement
    if placement.kind is PlacementKind.colocate:
        return ["Schedule: collect, train, push, in turns; every trajectory is on-policy"]
    room = (placement.max_staleness + 1) * config.algorithm.prompts_per_step
    return [
        "Schedule: generation and training at the same time",
        f"  staleness at most {placement.max_staleness} push(es); in flight at a push: {placement.in_flight.name}",
        f"  groups are trained on {'as they arrive' if config.stream else 'when all of a step are there'}",
        f"  buffer of {room} groups; correction: {config.correction.name}",
    ]
