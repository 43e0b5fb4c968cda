"""The doctor on the machine: shared memory, files, disk, ports, and whether model and data can be reached."""

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from app.config import RunConfig
from app.mode.doctor.finding import Finding, Verdict, judged
from app.mode.plan.trainer_memory import GIB
from app.model.architecture import architecture_of
from app.model.tiny.create import DEFAULT_CACHE
from app.utils.net import port_is_free

SHARED_MEMORY = Path("/dev/shm")
SHARED_GIB_FAIL, SHARED_GIB_WARN = 0.25, 2.0  # Ray's object store and tensors between processes live there
FILES_WARN = 4096
FREE_GIB = 2.0  # for logs and samples
CHECKPOINT_BYTES = 12  # a parameter: float32 master and Adam's moments
EXPORT_BYTES = 4
REACH_SECONDS = 10.0
OUTPUTS = "outputs"


def machine(config: RunConfig) -> Iterator[Finding]:
    if SHARED_MEMORY.is_dir():
        yield _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"ulimit -n {hard} (the hard limit), or higher in the container's or unit's settings"
    yield judged("open files", soft >= FILES_WARN, f"limit {soft:,}", advice, otherwise=Verdict.warn)
    yield _disk(config)
    yield _temporary()
    yield from _ports(config)


def reachable(config: RunConfig) -> Iterator[Finding]:
    """Model, data, cluster and servers."""
    yield _model(config)
    yield _data(config)
    if config.cluster.address not in (None, "auto", "local"):
        yield _cluster(str(config.cluster.address))
    for url in config.rollout.urls:
        yield _server(url)


def _shared_memory() -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free / GIB
    advice = "give the container more: --ipc=host or --shm-size=16g; in Kubernetes an emptyDir of medium Memory"
    worse = Verdict.fail if free < SHARED_GIB_FAIL else Verdict.warn
    return judged("shared memory", free >= SHARED_GIB_WARN, f"{free:.1f} GiB free", advice, otherwise=worse)


def _disk(config: RunConfig) -> Finding:
    """Room for the checkpoints that are kept, the one being written, and an export."""
    model, checkpoint = architecture_of(config.model), config.checkpoint
    parameters = 0 if model is None else model.parameters
    needed = FREE_GIB * GIB + (parameters * CHECKPOINT_BYTES * (checkpoint.keep + 1) if checkpoint.every else 0)
    if checkpoint.export:  # made of a checkpoint
        needed += parameters * (EXPORT_BYTES + (0 if checkpoint.every else CHECKPOINT_BYTES))
    folder = Path(OUTPUTS) if Path(OUTPUTS).is_dir() else Path()
    free = shutil.disk_usage(folder).free
    told = f"{free / GIB:.0f} GiB free under {folder.absolute()}, the run may write {needed / GIB:.0f}"
    advice = "free some, lower checkpoint.keep, or write elsewhere with hydra.run.dir=..."
    writable = os.access(folder, os.W_OK)
    return judged("disk", free >= needed and writable, told if writable else f"{folder} is not writable", advice)


def _temporary() -> Finding:
    """Ray keeps its session there, and stops taking objects where the disk is almost full."""
    usage = shutil.disk_usage(tempfile.gettempdir())
    told = f"{tempfile.gettempdir()} is {1 - usage.free / usage.total:.0%} full"
    advice = "free some: Ray refuses to spill objects at 95 %"
    return judged("temporary files", usage.free / usage.total > 0.05, told, advice, otherwise=Verdict.warn)


def _ports(config: RunConfig) -> Iterator[Finding]:
    first = config.rollout.port
    if first is None or config.rollout.urls:
        return
    taken = [port for port in range(first, first + config.engines) if not port_is_free("127.0.0.1", port)]
    told = f"{', '.join(map(str, taken))} in use" if taken else f"{first} to {first + config.engines - 1} are free"
    yield judged("ports", not taken, told, "give another rollout.port, or null for free ones")


def _model(config: RunConfig) -> Finding:
    given = config.model.path
    if given is None:
        cache = Path(config.model.tiny.cache or DEFAULT_CACHE).expanduser()
        made = any(cache.glob("tiny-*"))
        return Finding("model", Verdict.ok, "tiny, made already" if made else f"tiny, will be made in {cache}")
    folder = Path(given).expanduser()
    if folder.is_dir():
        good = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        advice = "give a Hugging Face directory with config.json, a tokenizer and safetensors"
        return judged("model", good, f"directory {folder}", advice)
    return _hub("model", given, "model.path")


def _data(config: RunConfig) -> Finding:
    given = config.data.path
    if given is None:
        return Finding("data", Verdict.ok, "arithmetic, generated")
    if Path(given).expanduser().is_file():
        return Finding("data", Verdict.ok, f"file {given}")
    return _hub("dataset", given, "data.path")


def _hub(kind: str, name: str, key: str) -> Finding:
    """Whether the hub, or the cache of an earlier download, has it."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound
    from huggingface_hub.utils import build_hf_headers

    subject = "data" if kind == "dataset" else kind
    try:
        if any(repo.repo_id == name and repo.repo_type == kind for repo in scan_cache_dir().repos):
            return Finding(subject, Verdict.ok, f"{name}, in the hub's cache")
    except CacheNotFound:
        pass  # nothing was ever fetched here
    try:
        asked = Request(f"{constants.ENDPOINT}/api/{kind}s/{quote(name)}", headers=build_hf_headers())
        with urlopen(asked, timeout=REACH_SECONDS):
            return Finding(subject, Verdict.ok, f"{name}, on the hub")
    except OSError as error:  # every way in which urllib fails
        advice = f"fetch it where there is a network, and give its folder as {key}=..."
        return Finding(subject, Verdict.fail, f"{name} cannot be reached: {error}", advice)


def _cluster(address: str) -> Finding:
    advice = "start Ray there (launch/ray_cluster.sh), open the port, or leave cluster.address=null"
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=REACH_SECONDS):
            return Finding("cluster", Verdict.ok, f"{address} answers")
    except OSError as error:
        return Finding("cluster", Verdict.fail, f"{address}: {error}", advice)


def _server(url: str) -> Finding:
    try:
        with urlopen(f"{url.rstrip('/')}/health", timeout=REACH_SECONDS) as reply:
            return judged("engine", reply.status == 200, f"{url} is healthy", "see the server's own log")
    except OSError as error:
        return Finding("engine", Verdict.fail, f"{url}: {error}", "start the server, or correct rollout.urls")
