"""Checks of a run's inputs. Each yields findings or raises `ConfigError`; preflight.py orders them."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from app.checkpoint.folder import FOLDER, complete
from app.checkpoint.run_state import read_state, require_model
from app.config import Mode, RunConfig
from app.config.data import TEMPLATE_KWARGS
from app.config.model import ModelConfig
from app.config.rollout import OWN_HEAD
from app.config.trainer import Optimizer
from app.data import rows
from app.data.counts import RowCounts, describe_rows
from app.data.prompts import check_template, conversation, rendering_warnings
from app.data.row import Row
from app.errors import ConfigError, expect, named
from app.model.architecture import (
    Architecture,
    architecture_of,
    checkpoint_config,
    draft_of,
    from_config,
    require_context,
    require_own_preset,
    trained_parameters,
)
from app.model.hf_directory import identity, load_tokenizer, require_complete, require_window
from app.model.lora.base_weights import has_own_head, require_targets
from app.model.lora.targets import check_served, check_targets
from app.start.environments import require_rendering
from app.start.inputs import CheckStage, CheckStatus, Finding, RunInputs
from app.tracking.dashboards import require_trackers
from app.tracking.number_format import plural
from app.types import Prompt
from app.utils.files import bytes_in, require_writable
from app.utils.units import size

CHECKPOINT_BYTES = 12  # per trained parameter: float32 master weight and Adam moments
EXPORT_BYTES = 4  # per parameter, at most
NO_TOKENS = np.zeros(1, np.int32)
PROMPT_CHARACTERS = 400  # shown of each end of a long prompt
REFUSED = "correct the setting; mode=train ends with this sentence"
WARNED = "a run warns of this, too"


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Bytes on disk, at most."""

    checkpoint: int  # bytes of one
    checkpoints: int  # number of them at once
    export: int

    @property
    def bytes(self) -> int:
        return self.checkpoints * self.checkpoint + self.export


def plan_disk(config: RunConfig, model: Architecture) -> DiskPlan:
    """Plan the disk space of a training run."""
    lora = config.model.lora
    trained = trained_parameters(model, lora)
    exported = model.parameters + (trained if lora.enabled else 0)
    settings = config.checkpoint
    # Without `keep` one is written for the export and deleted after it, else one is being written beside those kept.
    checkpoints = settings.keep + int(settings.keep_best) + 1 if settings.keep else int(settings.export)
    return DiskPlan(CHECKPOINT_BYTES * trained, checkpoints, EXPORT_BYTES * exported if settings.export else 0)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk; the folder may not exist yet."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    return shutil.disk_usage(existing).free


def sizes(run: RunInputs) -> None:
    """Preset, lengths and layers with adapters, as far as the model's sizes are known here."""
    config = run.config
    require_own_preset(config.model)
    require_context(config.rollout, checkpoint_config(config.model), str(config.model.path))
    known = architecture_of(config.model)
    if known is not None:
        draft_of(config.rollout, known)
        if config.model.lora.enabled:
            layers = {*known.full_attention, *known.linear_attention, *known.mlp}  # that can have adapters
            check_targets(config.model.lora.targets, layers)


def model(run: RunInputs) -> Iterator[Finding]:
    """Whether a local directory has all files."""
    settings = run.config.model
    if settings.local.is_dir():
        require_complete(settings.local, str(settings.path))
        yield Finding("model", f"directory {settings.local}")


def disk(run: RunInputs) -> Iterator[Finding]:
    """Whether the folder can be written, and a new run fits. The trainer's exact sizes are compared once it runs."""
    if run.folder is None:
        return
    require_writable("hydra.run.dir", str(run.folder))

    config, folder = run.config, run.folder
    known = architecture_of(config.model)
    saves = run.trains and config.trainer.optimizer is Optimizer.adamw
    needed = plan_disk(config, known).bytes if saves and known is not None else 0
    # a resumed run replaces checkpoints of its own
    available = free_bytes(folder) + bytes_in(complete(folder / FOLDER))
    if available < needed:
        accepted = f"a folder with {size(needed)} for checkpoints and the exported model, or lower checkpoint.keep"
        raise ConfigError("hydra.run.dir", folder, accepted, f"it has {size(available)}")
    yield Finding("disk", f"{size(available)} free for {folder.absolute()}, the run may write {size(needed)}")


def data(run: RunInputs) -> Iterator[Finding]:
    """Whether the rows of local files can be read, and their messages rendered."""
    config = run.config
    loaded = None
    if rows.sets_of(config.data).are_local:
        loaded = run.rows
        check_template([*loaded.train, *(row for each in loaded.evals.values() for row in each)], config.data)
        run.count_steps(RowCounts.of(loaded.train, loaded.evals, loaded, config.data.weights))
    else:
        rows.check_files(config.data, replies=run.replies)

    counted, *_ = describe_rows(config.data, loaded, config.algorithm.prompts_per_step, run.config.steps)
    yield Finding("data", f"{config.data.name}: {counted.removeprefix('Data: ')}")
    for warning in loaded.warnings if loaded is not None else ():
        yield Finding("data", warning, CheckStatus.warn, WARNED)


def own_code(run: RunInputs) -> Iterator[Finding]:
    """Whether trackers, objectives and advantages of the user's can be imported and used."""
    config = run.config
    require_trackers(config.tracking)
    if config.algorithm.own:
        from app.algorithm.custom_functions import require_own

        require_own(config.algorithm, config.teacher)
    if own := [*config.tracking.own, *config.algorithm.own]:
        yield Finding("own code", f"{', '.join(own)} can be loaded")


def devices(run: RunInputs) -> Iterator[Finding]:
    """Whether there are devices of this kind, and for a run on this machine enough of them."""
    config, device = run.config, run.device
    device.require()
    available, needed = device.count(), config.device_count
    message = f"{available} {device.kind.name} available, the run needs {needed}"
    if config.teacher_devices:
        message += f", {config.teacher_devices} of them for the teacher (teacher.devices)"
    if visible := os.environ.get(device.visibility or ""):
        message += f" ({device.visibility}={visible})"
    # CPU "devices" are shares of one machine, and a cluster may have the rest
    if device.shares_memory and config.cluster.address is None:
        name = "devices" if config.placement.colocated else "rollout_devices"
        key, value = f"placement.{name}", getattr(config.placement, name)
        accepted = "fewer devices, or join a cluster with cluster.address"
        expect(available >= needed, key, value, f"{accepted}; {message}")
    yield Finding("devices", message)


def model_files(run: RunInputs) -> None:
    """Context, windows and layers with adapters, from the files of the model."""
    config = run.config
    fields = checkpoint_config(replace(config.model, path=str(run.model_path), revision=None))
    require_context(config.rollout, fields, str(config.model.path))
    require_window(run.model_path, tokens=config.rollout.max_tokens)
    if config.model.lora.enabled:
        require_targets(run.model_path, config.model.lora)
        if config.engines:
            check_served(config.model.lora.targets)
    if (known := from_config(fields or {})) is not None:
        draft_of(config.rollout, known)
    if config.rollout.speculative == OWN_HEAD:
        accepted = "none, or a checkpoint with mtp.* tensors: an engine would draft with a head of random weights"
        expect(has_own_head(run.model_path), "rollout.speculative", OWN_HEAD, accepted)


def linear_attention(run: RunInputs) -> Iterator[Finding]:
    """Whether an accelerator has kernels for the model's linear attention."""
    known, device = architecture_of(run.config.model), run.device
    if known is None or known.linear is None or not device.shares_memory or not device.loops_linear_attention():
        return
    message = (
        f"the linear attention of {run.config.model.path} trains in transformers' torch loop over chunks of 64 tokens, "
        f"which moves ten to fifty times the bytes of kernels, see mode=plan: install {device.linear_attention}"
    )
    yield Finding("linear attention", message, CheckStatus.warn, WARNED)


def prompts(run: RunInputs) -> Iterator[Finding]:
    """The tokenizer, how conversations are rendered, and the lengths of the prompts."""
    config = run.config
    require_rendering(config, run.model_path, run.tokenizer)
    made = run.prompts
    for prompt in made.all if config.environment.multi_turn else ():
        # an environment does not know them in later turns
        own = prompt.template_kwargs.keys() - {"tools"}
        accepted = f"{', '.join(sorted(own))} for all rows: with an environment those of a row are not accepted"
        expect(not own, f"data.{TEMPLATE_KWARGS}", config.data.chat_template_kwargs, accepted)
    run.count_steps(made.counts)
    evaluated = sum(map(len, made.evals.values()))
    yield Finding("prompts", f"{len(made.train):,} to train on, {evaluated:,} to evaluate on")

    warnings = [] if rows.sets_of(config.data).are_local else [*made.warnings]  # of local rows `data` warns
    warnings += rendering_warnings(made.all, config.data, run.tokenizer)
    if made.dropped:
        limit = f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}"
        warnings.append(f"dropped {made.dropped} of {made.total} prompts: longer than {limit}")
    for warning in warnings:
        yield Finding("prompts", warning, CheckStatus.warn, WARNED)

    start = made.train.state()
    (first,) = made.train.take(1)
    made.train.restore(start)
    text = run.tokenizer.decode(first.token_ids)
    if (omitted := len(text) - 2 * PROMPT_CHARACTERS) > 0:
        text = f"{text[:PROMPT_CHARACTERS]} … {omitted:,} characters … {text[-PROMPT_CHARACTERS:]}"
    yield Finding("first prompt", json.dumps(text, ensure_ascii=False))


def demonstrations(run: RunInputs) -> Iterator[Finding]:
    """Whether the replies to imitate can be rendered, and how many are too long."""
    config = run.config
    warnings = []
    if run.replies:
        prompts = run.prompts.train.prompts
    elif config.data.demonstrations is not None:
        prompts = run.demonstrations.prompts
        warnings += run.demonstration_rows[1]
        if dropped := run.demonstrations.dropped:
            warnings.append(f"{dropped} demonstrations are dropped: prompts longer than rollout.max_prompt_tokens")
    else:
        return

    yield Finding("demonstrations", f"{len(prompts):,} to imitate")
    if cut := run.demonstrator.count_cut(prompts):
        limit = f"rollout.max_prompt_tokens + rollout.max_completion_tokens = {config.rollout.max_tokens}"
        warnings.append(f"{cut} of {len(prompts)} demonstrations are cut: longer than {limit}")
    for warning in warnings:
        yield Finding("demonstrations", warning, CheckStatus.warn, WARNED)


def teacher(run: RunInputs) -> Iterator[Finding]:
    """Whether the teacher can score: its files or servers, and that it has the vocabulary of the policy."""
    config = run.config
    if not config.teacher.given:
        accepted = (
            "the teacher's model, or teacher.urls=addresses of SGLang servers, with algorithm.reward_coefficient=0, "
            "which learns from a teacher"
        )
        needless = config.algorithm.reward_coefficient > 0 or not run.trains
        expect(needless, "teacher.path", config.teacher.path, accepted)
        return
    if config.teacher.path is not None:
        yield from _teacher_files(run, config.teacher.path)
        return
    if run.moment is CheckStage.plan or not run.trains:
        return
    from app.teacher import require_teacher

    require_teacher(config.teacher, run.tokenizer)
    addresses = [url for urls in config.teacher.servers.values() for url in urls]
    yield Finding("teacher", f"{', '.join(addresses)} can score")


def _teacher_files(run: RunInputs, path: str) -> Iterator[Finding]:
    if run.teacher_path is None:
        return
    fields = checkpoint_config(ModelConfig(path=str(run.teacher_path)))
    limits = replace(run.config.rollout, engine_args=run.config.teacher.engine_args)
    require_context(limits, fields, path, key="teacher.path")
    if run.moment is not CheckStage.plan:
        from app.teacher import require_same_tokens

        with named("teacher.path"):
            loaded = load_tokenizer(run.teacher_path, trust_remote_code=run.config.model.trust_remote_code)
        require_same_tokens(path, loaded, run.tokenizer)
    devices = plural(run.config.teacher_devices, "device")
    yield Finding("teacher", f"directory {run.teacher_path}, on {devices} of its own")


def same_run(run: RunInputs) -> None:
    """Whether model and data are those of the checkpoint that the run starts from."""
    if run.checkpoint is None:
        return
    state = read_state(run.checkpoint)
    require_model(state, identity(run.model_path, run.config.model.lora, run.chat_template), run.checkpoint)
    if run.config.mode.trains:
        start = run.prompts.train.state()
        run.restore(state.extra)  # compares the data
        run.prompts.train.restore(start)


def environment(run: RunInputs) -> None:
    """Whether a worker process can load the environment and its renderer."""
    if run.config.environment.multi_turn:
        _ = run.tasks


def code(run: RunInputs) -> Iterator[Finding]:
    """With reward=code: whether the sandbox can run a program here, and which form the tests of the rows have."""
    if run.config.reward.code is None:
        return
    from app.reward.code.check import describe_tests, require_sandbox

    description, weak = require_sandbox()
    yield Finding("sandbox", description, CheckStatus.warn if weak else CheckStatus.ok, WARNED if weak else "")
    if "data" not in run.missing:
        places = [[(f"{row.source}/{row.index}", row.columns, row.answer) for row in rows] for rows in _sets(run)]
        yield Finding("tests", describe_tests(places))


def reward(run: RunInputs) -> Iterator[Finding]:
    """Whether worker processes can load the user's rewards and score trial completions of some rows with them."""
    config = run.config
    own = [term.target for term in config.reward.terms().values() if term.target is not None]
    if not own:
        yield Finding("reward", config.reward.formula)
        return
    from app.reward.tryout import tokenizer_of, try_rewards

    # those that read turns or scores would fail on completions made up without them
    tried = replace(config.reward, tryout=config.reward.tryout and not config.environment.multi_turn)
    tokenize = tokenizer_of(run.tokenizer) if run.moment is CheckStage.start else lambda text: list(text.encode())
    prompts = []  # one of each set, since their rows may have other columns
    for row, *_ in _sets(run):
        name, messages = f"{row.source}/{row.index}", conversation(row, config.data)
        prompts.append(Prompt(name, NO_TOKENS, row.answer, row.source, row.question, row.columns, messages))
    for warning in try_rewards(tried, prompts, tokenize):
        yield Finding("reward", warning, CheckStatus.warn, WARNED)
    yield Finding("reward", f"{config.reward.formula}; {', '.join(own)} can be loaded")


def _sets(run: RunInputs) -> list[Sequence[Row]]:
    """Return the rows that are trained on and those of each evaluation set; nothing if they are not here."""
    if "data" in run.missing:
        return []
    trained = [] if run.config.mode is Mode.eval else [run.rows.train]
    return [*trained, *run.rows.evals.values()]
