"""The extension of a trainer rank that hands its adapters to the engines.

A push is small (132 MB for rank 32 of a 4B), so rank 0 gathers all of it at once and needs no buckets. Engines on its
machine read it from a file in shared memory; others get its bytes in the request.
"""

import base64
import io
import json
import pickle
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from app.errors import SyncError
from app.trainer.rank import TrainerRank
from app.types import TrainerMemory
from app.utils.process import SHARED_MEMORY, run_prefix
from app.weight_sync.buckets import Receivers

if TYPE_CHECKING:
    from torch import Tensor


ADAPTER_EXTENSION: Final = "adapter_sync"  # the name under which an `AdapterSender` is attached to every trainer rank


@dataclass(frozen=True, slots=True)
class AdapterPush:
    """What rank 0 gathered of one policy version."""

    folder: Path | None  # in shared memory, in PEFT's form
    inline: dict[str, Any]  # without a folder: the adapter's configuration, and its tensors for one engine rank
    bytes: int

    def body(self, tensor_parallel: int) -> dict[str, Any]:
        """Return the body of `RolloutEngine.load_adapter` for an engine of this many ranks."""
        if self.folder is not None:
            return {"lora_path": str(self.folder)}
        return {
            "config_dict": self.inline["config"],
            "serialized_named_tensors": [self.inline["tensors"]] * tensor_parallel,
        }


class AdapterSender:
    """Gathers the adapters of a trainer rank.

    Lifecycle: `gather`, then `release` when the engines have loaded them; `close` once.
    """

    def __init__(self, trainer_rank: TrainerRank):
        import torch

        from app.model.policy import named_trained_tensors

        self.trainer_rank = trainer_rank
        self.dtype = getattr(torch, trainer_rank.spec.dtype.name)
        self.tensors = dict(named_trained_tensors(trainer_rank.model))
        self.receivers = Receivers.rank_0 if trainer_rank.device.has_gather else Receivers.rank_0_by_all_gather
        self._folder: Path | None = None

    def gather(self, one_machine: bool) -> AdapterPush | None:
        """Gather the adapters in the engines' dtype. A collective; None on ranks other than 0.

        Args:
            one_machine: Whether the engines see this machine's shared memory.

        Raises:
            SyncError: The shared memory is full.
        """
        from app.model.lora.names import served_config

        self.trainer_rank.require_onloaded("weight sync", TrainerMemory.parameters)
        self.release()
        tensors = dict(pair for name in self.tensors for pair in self._gather(name))
        if self.trainer_rank.rank != 0:
            return None

        size = sum(tensor.nbytes for tensor in tensors.values())
        config = served_config(self.trainer_rank.spec.lora)
        if one_machine:
            self._folder = _write(tensors, config, size)
            return AdapterPush(self._folder, {}, size)
        return AdapterPush(None, {"config": config, "tensors": serialize(tensors)}, size)

    def release(self) -> None:
        """Remove the last push from shared memory. Idempotent. Engines that read it keep what they need."""
        self.trainer_rank.profiler.finish()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        """Free everything."""
        self.release()

    def _gather(self, name: str) -> "list[tuple[str, Tensor]]":
        """Return the full tensor on the host under the engine's names; nothing on ranks other than 0."""
        import torch

        from app.model.lora.names import served
        from app.weight_sync.gather import gather_full

        tensor = self.tensors[name].detach()
        out = None
        if self.trainer_rank.rank == 0:
            out = torch.empty(tensor.numel(), dtype=self.dtype, device=tensor.device)
        gather_full(tensor, self.dtype, out=out, receivers=self.receivers)
        if out is None:
            return []
        return served(name, out.cpu().view(tensor.shape), self.trainer_rank.model.config)


def _write(tensors: "dict[str, Tensor]", config: dict[str, Any], size: int) -> Path:
    from safetensors.torch import save_file

    free = shutil.disk_usage(SHARED_MEMORY).free
    if size > free:
        raise SyncError(
            f"the adapter needs {size / 2**20:.0f} MiB, but {SHARED_MEMORY} has only {free / 2**20:.0f} MiB free: give "
            "the machine more shared memory"
        )
    folder = Path(tempfile.mkdtemp(prefix=f"{run_prefix()}adapter-", dir=SHARED_MEMORY))
    try:
        (folder / "adapter_config.json").write_text(json.dumps(config))
        # clones: parts of a fused projection share their A, which safetensors refuses
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def serialize(tensors: "dict[str, Tensor]") -> str:
    """Return the tensors as SGLang's `/load_lora_adapter_from_tensors` takes them: base64 of a pickle of tensors."""
    pickled = io.BytesIO()
    pickle.dump({name: tensor.clone() for name, tensor in tensors.items()}, pickled, protocol=pickle.HIGHEST_PROTOCOL)
    return base64.b64encode(pickled.getvalue()).decode()
