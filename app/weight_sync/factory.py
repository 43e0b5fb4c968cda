"""Chooses the parts of a run's weight sync; whoever pushes never asks which they are."""

from collections.abc import Sequence
from pathlib import Path

from app.config import RunConfig
from app.config.weight_sync import TransportKind, transport_of
from app.device import Device
from app.protocols import RolloutEngine
from app.weight_sync.backends import backend_of
from app.weight_sync.synchronizer import BucketedWeightSynchronizer
from app.weight_sync.transport.base import TrainerGroup, Transport
from app.weight_sync.transport.collective import CollectiveTransport
from app.weight_sync.transport.ipc import IpcTransport
from app.weight_sync.verify import Verifier


def make_sync(
    config: RunConfig, device: Device, ranks: TrainerGroup, engines: Sequence[RolloutEngine], folder: Path
) -> BucketedWeightSynchronizer:
    """The sync of a run, not prepared yet; `folder` is the run's."""
    width = config.rollout.tensor_parallel
    carrier: Transport
    if transport_of(config.weight_sync, shared_devices=config.shared_devices) is TransportKind.ipc:
        carrier = IpcTransport(tensor_parallel=width)
    else:
        carrier = CollectiveTransport(backend=backend_of(device.torch_type), tensor_parallel=width)
    verifier = Verifier(config.weight_sync.verify, folder / "verify")
    return BucketedWeightSynchronizer(
        ranks, engines, config.weight_sync, carrier, verifier, in_flight=config.placement.in_flight
    )
