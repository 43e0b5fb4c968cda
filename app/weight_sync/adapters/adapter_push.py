"""What trainer rank 0 hands to the driver for a sync of adapters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
