"""Composes a run's weight synchronizer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import RunConfig
from app.config.weight_sync import TransportKind, transport_of
from app.device import Device
from app.protocols import RolloutEngine
from app.trainer.remote import RemoteTrainer
from app.utils.user_code import resolve
from app.weight_sync.synchronizer import BucketedWeightSynchronizer
from app.weight_sync.transport.base import Transport
from app.weight_sync.transport.collective import CollectiveTransport
from app.weight_sync.transport.ipc import IpcTransport
from app.weight_sync.verify import Verifier

if TYPE_CHECKING:
    from app.weight_sync.adapters import AdapterSynchronizer

    Synchronizer = BucketedWeightSynchronizer | AdapterSynchronizer

TRANSPORTS: Mapping[TransportKind, Callable[..., Transport]] = {
    TransportKind.collective: CollectiveTransport,
    TransportKind.ipc: IpcTransport,
}


def make_synchronizer(
    config: RunConfig,
    device: Device,
    trainer: RemoteTrainer,
    engines: Sequence[RolloutEngine],
    folder: Path,
    *,
    one_machine: bool,
) -> "Synchronizer":
    """Create the synchronizer of a run in `folder`, not prepared yet.

    `one_machine`: whether trainer ranks and engines share a machine, and with it the shared memory of its processes.
    """
    tensor_parallel = config.rollout.tensor_parallel
    if config.model.lora.enabled:
        from app.weight_sync.adapters import AdapterSynchronizer

        return AdapterSynchronizer(
            trainer,
            engines,
            config.weight_sync,
            tensor_parallel=tensor_parallel,
            one_machine=one_machine and not config.rollout.urls,
        )

    kind = transport_of(config.weight_sync, shared_devices=config.shared_devices, device=device.kind)
    target = config.weight_sync._target_
    make: Callable[..., Transport] = TRANSPORTS[kind] if target is None else resolve(target)
    transport = make(backend=device.collective, tensor_parallel=tensor_parallel, **config.weight_sync.args)

    verifier = Verifier(config.weight_sync.verify, folder / "verify")
    return BucketedWeightSynchronizer(
        trainer,
        engines,
        config.weight_sync,
        transport,
        verifier,
        in_flight=config.placement.in_flight,
        tensor_parallel=tensor_parallel,
    )
