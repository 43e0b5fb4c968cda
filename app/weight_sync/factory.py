"""Chooses the parts of a run's weight sync; whoever pushes never asks which they are."""

from collections.abc import Sequence
from pathlib import Path

from app.config import RunConfig
from app.config.weight_sync import Transport, transport_of
from app.device import Device
from app.protocols import RolloutEngine
from app.weight_sync.backends import backend_of
from app.weight_sync.synchronizer import Push
from app.weight_sync.transport.base import Carrier, Ranks
from app.weight_sync.transport.collective import Collective
from app.weight_sync.transport.ipc import Handle
from app.weight_sync.verify import Verifier


def make_sync(config: RunConfig, device: Device, ranks: Ranks, engines: Sequence[RolloutEngine], folder: Path) -> Push:
    """The sync of a run, not prepared yet; `folder` is the run's."""
    width = config.rollout.tensor_parallel
    carrier: Carrier
    if transport_of(config.weight_sync, shared_devices=config.shared_devices) is Transport.handle:
        carrier = Handle(tensor_parallel=width)
    else:
        carrier = Collective(backend=backend_of(device.torch_type), tensor_parallel=width)
    verifier = Verifier(config.weight_sync.verify, folder / "verify")
    return Push(ranks, engines, config.weight_sync, carrier, verifier, in_flight=config.placement.in_flight)
