"""Settings of `weight_sync`."""

from dataclasses import dataclass
from enum import Enum

from app.config.device import DeviceKind
from app.config.setting import SECONDS, setting
from app.errors import expect


class TransportKind(Enum):
    """How weights travel from the trainer to the engines."""

    auto = "auto"
    collective = "collective"
    ipc = "ipc"


class Verify(Enum):
    """Syncs that are verified."""

    never = "never"
    first = "first"
    always = "always"


class Probe(Enum):
    """The reaction to an engine that does not sample with the trainer's weights."""

    stop = "stop"
    warn = "warn"
    never = "never"


class SyncMode(Enum):
    """All weights, or the changed ones."""

    full = "full"
    delta = "delta"


class SnapshotPlace(Enum):
    """Memory that holds the last synced weights."""

    device = "device"
    host = "host"


@dataclass
class WeightSyncConfig:
    """Weight sync from the trainer to the engines."""

    transport: TransportKind = setting(
        TransportKind.auto,
        "collective broadcasts over a process group of trainer rank 0 and every engine rank; ipc, auto where trainer "
        "and engines share devices, passes tensor handles. Adapters: shared memory, or HTTP between machines.",
    )
    mode: SyncMode = setting(
        SyncMode.full, "delta sends only the weights that changed since the last sync, where that is smaller."
    )
    snapshot: SnapshotPlace = setting(
        SnapshotPlace.device, "With mode=delta, where the last synced weights are kept; host is pinned memory."
    )
    bucket_mib: float | None = setting(
        None, "Size of a bucket, or one larger tensor; null: 64 on a CPU, else 2048.", above=0, noun="a number of MiB"
    )
    verify: Verify = setting(
        Verify.never,
        "first compares the first sync, and the first sync of a trained policy, with the exported checkpoint; always "
        "also compares the engines' checksums after every sync.",
    )
    probe: Probe = setting(
        Probe.stop,
        "After the first syncs and every 20th, the trainer computes how probable a few tokens of each engine are; stop "
        "ends the run where rounding does not explain the difference, never does not compare.",
    )
    timeout_s: float = setting(300.0, "Deadline of each wait within a sync.", above=0, noun=SECONDS)

    def validate_for_adapters(self) -> None:
        why = "with model.lora.rank above 0, where a sync sends the adapters alone"
        expect(self.transport is TransportKind.auto, "weight_sync.transport", self.transport, f"auto {why}")
        expect(self.mode is SyncMode.full, "weight_sync.mode", self.mode, f"full {why}")
        compares = "never with model.lora.rank above 0: mode=parity compares adapters"
        expect(self.verify is Verify.never, "weight_sync.verify", self.verify, compares)

    def validate(self, *, dtype_bytes: int, starts_engines: bool, engines_keep_weights: bool) -> None:
        """Raise `ConfigError` where the engines cannot apply deltas to their weights."""
        full = self.mode is SyncMode.full
        for possible, accepted in (
            (dtype_bytes == 2, "full with device.dtype=float32, where a step changes nearly every weight"),
            (starts_engines, "full with rollout.urls: deltas need the plugin of engines that this run starts"),
            (engines_keep_weights, "full with offload.engine=true, which drops the engines' weights in every step"),
        ):
            expect(full or possible, "weight_sync.mode", self.mode, accepted)


def transport_of(config: WeightSyncConfig, *, shared_devices: bool, device: DeviceKind) -> TransportKind:
    """Resolve the transport. Raises `ConfigError` for one that trainer and engines on these devices cannot have."""
    kind = config.transport
    if kind is TransportKind.auto:
        return TransportKind.ipc if shared_devices else TransportKind.collective

    accepted = "auto or collective: ipc needs trainer and engine on the same devices, as in placement=colocate"
    expect(kind is TransportKind.collective or shared_devices, "weight_sync.transport", kind, accepted)
    joins = kind is TransportKind.ipc or not shared_devices or device is DeviceKind.cpu
    accepted = f"auto or ipc with placement=colocate and device={device.name}: a process group has one rank on a device"
    expect(joins, "weight_sync.transport", kind, accepted)
    return kind
