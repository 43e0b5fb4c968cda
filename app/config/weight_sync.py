"""Settings of `weight_sync`."""

from dataclasses import dataclass
from enum import Enum

from app.errors import expect


class TransportKind(Enum):
    auto = "auto"  # handle in colocate, collective in fully_async
    collective = "collective"  # a process group of trainer rank 0 and every engine rank
    ipc = "ipc"  # tensor handles between processes that share a device


class Verify(Enum):
    never = "never"
    first = "first"  # the first push, and the first of a trained policy, are compared with the exported checkpoint
    always = "always"  # and the engines' checksums with each other after each push


class SyncMode(Enum):
    full = "full"  # every push sends all weights
    delta = "delta"  # only what changed since the last push, where that is less; bit for bit the same


class SnapshotPlace(Enum):
    device = "device"  # beside the parameters
    host = "host"  # pinned memory of the machine


@dataclass
class WeightSyncConfig:
    transport: TransportKind = TransportKind.auto
    mode: SyncMode = SyncMode.full
    full_every: int = 0  # delta: every so many pushes a full one; 0: the first, and after failures and replacements
    snapshot: SnapshotPlace = SnapshotPlace.device  # delta: where the last pushed weights are kept
    bucket_mib: float = 512.0  # a larger tensor is a bucket of its own
    verify: Verify = Verify.never
    timeout_s: float = 300.0  # for each wait of a push


def validate(config: WeightSyncConfig) -> None:
    expect(config.bucket_mib > 0, "weight_sync.bucket_mib", config.bucket_mib, "a number of MiB above 0")
    expect(config.full_every >= 0, "weight_sync.full_every", config.full_every, "0 or a whole number of pushes")
    expect(config.timeout_s > 0, "weight_sync.timeout_s", config.timeout_s, "a number of seconds above 0")


def transport_of(config: WeightSyncConfig, *, shared_devices: bool) -> TransportKind:
    """The transport in force. `shared_devices`: each engine rank stands on the card of a trainer rank of ours."""
    if config.transport is TransportKind.auto:
        return TransportKind.ipc if shared_devices else TransportKind.collective
    expect(
        config.transport is TransportKind.collective or shared_devices,
        "weight_sync.transport",
        config.transport,
        "auto or collective: a handle needs trainer and engine on the same devices, as in placement=colocate without "
        "rollout.urls",
    )
    return config.transport


def validate_mode(config: WeightSyncConfig, *, item_bytes: int, own_engines: bool, weights_stay: bool) -> None:
    """`item_bytes`: of the engine's dtype. `own_engines`: started by us, with our plugin in them.

    `weights_stay`: in the engines from one push to the next; what a memory saver released comes back undefined.
    """
    if config.mode is SyncMode.full:
        return
    expect(
        item_bytes == 2,
        "weight_sync.mode",
        config.mode,
        "full with device.dtype=float32, where a step changes nearly every weight, or delta with device.dtype=bfloat16",
    )
    expect(
        own_engines,
        "weight_sync.mode",
        config.mode,
        "full with rollout.urls: a delta is written by a plugin of engines that this run starts",
    )
    expect(
        weights_stay,
        "weight_sync.mode",
        config.mode,
        "full with placement=colocate and offload.engine=true, which drops the engines' weights in every step",
    )
