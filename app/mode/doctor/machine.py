"""Checks of the machine: shared memory, files, disk, ports, and access to model, data, cluster and servers."""

import json
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from app.config import RunConfig
from app.data import rows
from app.data.counts import describe_rows
from app.data.records import sources
from app.errors import ConfigError
from app.mode.disk import free_bytes, plan_disk
from app.mode.doctor.finding import Check, CheckStatus, check
from app.mode.doctor.scripted_episode import SUBJECT, play_episode
from app.mode.inputs import problems
from app.mode.preflight import load_from
from app.model.architecture import architecture_of
from app.model.hf_directory import local_folder
from app.utils.files import not_writable
from app.utils.net import port_is_free
from app.utils.process import SHARED_MEMORY
from app.utils.units import GIB, size

SHARED_GIB_FAIL = 0.25  # Ray's object store and tensors between processes live there
SHARED_GIB_WARN = 2.0
OPEN_FILES_WARN = 4096
FREE_GIB = 2.0  # for logs and samples
FULL_DISK = 0.95  # Ray stops spilling objects there
REACH_TIMEOUT_S = 10.0
OUTPUTS = "outputs"
PROMPT_CHARACTERS = 400  # shown of each end of a long prompt


def machine(config: RunConfig, folder: Path = Path(OUTPUTS)) -> Iterator[Check]:
    """Check shared memory, open files, disk, temporary files and ports."""
    if SHARED_MEMORY.is_dir():
        yield _shared_memory()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hint = f"ulimit -n {hard} (the hard limit), or raise it in the container or unit settings"
    yield check("open files", soft >= OPEN_FILES_WARN, f"limit {soft:,}", hint, otherwise=CheckStatus.warn)

    yield _disk(config, folder)
    yield _temporary()
    yield from _ports(config)


def reachable(config: RunConfig) -> Iterator[Check]:
    """Check model, data, environment, rewards and trackers as a run does, and access to hub, cluster and servers."""
    refused = problems(config)
    yield _refused("model", refused) or _model(config)
    data = _refused("data", refused) or _data(config)
    yield data
    rewards = [term.target for term in config.reward.terms().values() if term.target is not None]
    transports = [config.weight_sync._target_] if config.weight_sync._target_ else []
    custom = {
        "reward": rewards,
        "tracker": config.tracking.own,
        "transport": transports,
        "algorithm": config.algorithm.own,
    }
    for subject, targets in custom.items():
        if targets:
            accepted = Check(subject, CheckStatus.ok, f"{', '.join(targets)} can be loaded")
            yield _refused(subject, refused) or accepted
    if config.environment.multi_turn:
        yield _refused("environment", refused) or _episodes(config, usable="data" not in refused)
    folder = local_folder(config.model)
    if not refused and folder is not None and rows.is_local(config.data):
        yield from _prompts(config, folder, data.message)
    if config.cluster.address not in (None, "auto", "local"):
        yield _cluster(str(config.cluster.address))
    for url in config.rollout.urls:
        yield _server(url)


def _shared_memory() -> Check:
    free = shutil.disk_usage(SHARED_MEMORY).free / GIB
    hint = "give the container more: --ipc=host or --shm-size=16g; in Kubernetes an emptyDir of medium Memory"
    status = CheckStatus.fail if free < SHARED_GIB_FAIL else CheckStatus.warn
    return check("shared memory", free >= SHARED_GIB_WARN, f"{free:.1f} GiB free", hint, otherwise=status)


def _disk(config: RunConfig, folder: Path) -> Check:
    """Check the space for the kept checkpoints, the one being written, and an export."""
    model = architecture_of(config.model)
    written = 0 if model is None else plan_disk(config, model).bytes
    needed = FREE_GIB * GIB + written

    hint = "free some space, lower checkpoint.keep, or write elsewhere with hydra.run.dir=..."
    reason = not_writable(folder)
    if reason is not None:
        return Check("disk", CheckStatus.fail, f"{folder.absolute()} cannot be written: {reason}", hint)
    free = free_bytes(folder)
    message = f"{size(free)} free for {folder.absolute()}, the run may write {size(needed)}"
    return check("disk", free >= needed, message, hint)


def _temporary() -> Check:
    """Check the disk of Ray's session folder."""
    folder = tempfile.gettempdir()
    usage = shutil.disk_usage(folder)
    used = 1 - usage.free / usage.total
    hint = f"free some space: Ray refuses to spill objects at {FULL_DISK:.0%}"
    return check("temporary files", used < FULL_DISK, f"{folder} is {used:.0%} full", hint, otherwise=CheckStatus.warn)


def _ports(config: RunConfig) -> Iterator[Check]:
    first = config.rollout.port
    if first is None or config.rollout.urls:
        return
    ports = range(first, first + config.engines)
    taken = [port for port in ports if not port_is_free("127.0.0.1", port)]
    message = f"{', '.join(map(str, taken))} in use" if taken else f"{ports[0]} to {ports[-1]} are free"
    yield check("ports", not taken, message, "set another rollout.port, or null for free ones")


def _refused(subject: str, refused: Mapping[str, str]) -> Check | None:
    """Return the failed check of an input that a run refuses; None if it does not."""
    if subject not in refused:
        return None
    return Check(
        SUBJECT if subject == "environment" else subject,
        CheckStatus.fail,
        refused[subject],
        "correct the setting; mode=train ends with this sentence",
    )


def _episodes(config: RunConfig, *, usable: bool) -> Check:
    """Check an environment that can be loaded by an episode with made-up replies. `usable`: its data can be read."""
    folder = local_folder(config.model)
    if folder is None or not usable:
        missing = "the model is on this machine" if folder is None else "the data can be read"
        return Check(SUBJECT, CheckStatus.warn, "no environment was loaded", f"examine it again when {missing}")
    return play_episode(config, folder)


def _prompts(config: RunConfig, folder: Path, shown: str) -> Iterator[Check]:
    """Check the tokenizer, the chat template and the lengths of the prompts, as a run does, and show the first one.

    Args:
        config: Of a run whose inputs are not refused.
        folder: The model's directory.
        shown: Contains warnings that need no repetition.
    """
    try:
        inputs = load_from(folder, config, lambda _: None)
    except ConfigError as error:
        hint = "correct the setting; mode=train ends with this sentence"
        yield Check("prompts", CheckStatus.fail, str(error), hint)
        return

    prompts = inputs.prompts
    warnings = [each for each in inputs.warnings if each not in shown]
    counted = f"{len(prompts.train):,} to train on, {sum(map(len, prompts.evals.values())):,} to evaluate on"
    message = "; ".join([counted, *warnings])
    yield check("prompts", not warnings, message, "a run warns of this, too", otherwise=CheckStatus.warn)

    (first,) = prompts.train.take(1)
    yield Check("first prompt", CheckStatus.ok, _shown(inputs.tokenizer.decode(first.token_ids)))


def _shown(text: str) -> str:
    """Return a prompt as one line, without its middle if it is long."""
    omitted = len(text) - 2 * PROMPT_CHARACTERS
    if omitted > 0:
        text = f"{text[:PROMPT_CHARACTERS]} … {omitted:,} characters … {text[-PROMPT_CHARACTERS:]}"
    return json.dumps(text, ensure_ascii=False)


def _model(config: RunConfig) -> Check:
    folder = config.model.local
    if folder.is_dir():
        return Check("model", CheckStatus.ok, f"directory {folder}")
    return _hub("model", "model", str(config.model.path), "model.path")


def _data(config: RunConfig) -> Check:
    data = config.data
    if not rows.is_local(data):
        failed = [each for each in _hub_sets(config) if each.status is CheckStatus.fail]
        found = describe_rows(data, config.algorithm.prompts_per_step, config.steps)[0]
        return failed[0] if failed else Check("data", CheckStatus.ok, found.removeprefix("Data: "))

    try:
        counted, *warnings = describe_rows(data, config.algorithm.prompts_per_step, config.steps)
    except ConfigError as error:
        return Check("data", CheckStatus.fail, str(error), "correct the setting or the file")
    message = "; ".join([f"{data.name}: {counted.removeprefix('Data: ')}", *map(str.strip, warnings)])
    return check("data", not warnings, message, "a run warns of this, too", otherwise=CheckStatus.warn)


def _hub_sets(config: RunConfig) -> Iterator[Check]:
    """Check access to each data set of the hub that the run reads."""
    for key, path in rows.paths(config.data).items():
        for part in [path] if isinstance(path, str) else path:
            if sources.is_remote(part) and not Path(part).expanduser().is_dir():
                yield _hub("data", "dataset", part, key)


def _hub(subject: str, kind: str, name: str, key: str) -> Check:
    """Check that the hub, or its local cache, has a repository."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound
    from huggingface_hub.utils import build_hf_headers

    try:
        if any(repo.repo_id == name and repo.repo_type == kind for repo in scan_cache_dir().repos):
            return Check(subject, CheckStatus.ok, f"{name}, in the hub cache")
    except CacheNotFound:
        pass  # nothing was ever downloaded

    request = Request(f"{constants.ENDPOINT}/api/{kind}s/{quote(name)}", headers=build_hf_headers())
    try:
        with urlopen(request, timeout=REACH_TIMEOUT_S):
            return Check(subject, CheckStatus.ok, f"{name}, on the hub")
    except OSError as error:  # every failure of urllib
        hint = f"download it on a machine with network access, and set {key}=... to its folder"
        return Check(subject, CheckStatus.fail, f"{name} cannot be reached: {error}", hint)


def _cluster(address: str) -> Check:
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=REACH_TIMEOUT_S):
            return Check("cluster", CheckStatus.ok, f"{address} answers")
    except OSError as error:
        hint = "start Ray there (launch/ray_cluster.sh), open the port, or leave cluster.address=null"
        return Check("cluster", CheckStatus.fail, f"{address}: {error}", hint)


def _server(url: str) -> Check:
    try:
        with urlopen(f"{url.rstrip('/')}/health", timeout=REACH_TIMEOUT_S) as reply:
            return check("engine", reply.status == 200, f"{url} is healthy", "see the server's log")
    except OSError as error:
        return Check("engine", CheckStatus.fail, f"{url}: {error}", "start the server, or correct rollout.urls")
