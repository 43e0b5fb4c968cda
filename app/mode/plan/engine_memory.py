"""The memory of one engine rank, as SGLang shares it out.

`rollout.memory_fraction` of the device is weights and caches; the rest is for activations and graphs. Of what the
weights leave, a model with linear attention gives 0.9 / 1.9 to the states of its requests (SGLang's default
mamba_full_memory_ratio) and the KV cache gets what remains; `max-total-tokens` bounds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.config import RunConfig
from app.device import Device
from app.mode.plan.trainer_memory import GIB, Items
from app.model.architecture import Architecture

CONV_BYTES = 2  # SGLang keeps the convolution's inputs in bfloat16
STATE_SHARE = 0.9 / 1.9
DEFAULT_PREFILL = 8192  # tokens of a chunk
RUNNING_REQUESTS = 256  # for the logits, where no flag says how many


@dataclass(frozen=True, slots=True)
class EngineMemoryPlan:
    """Of one tensor-parallel rank; `capacity` is the device's memory in bytes."""

    config: RunConfig
    device: Device
    model: Architecture
    flags: Mapping[str, object]
    capacity: float

    @property
    def item(self) -> int:
        return self.config.device.dtype.bytes

    @property
    def width(self) -> int:
        return self.config.rollout.tensor_parallel

    @property
    def weights(self) -> float:
        return (self.model.parameters + self.model.vision_parameters) * self.item / self.width

    @property
    def rest(self) -> float:
        """What the weights leave for caches; below 0 where they do not fit."""
        return float(str(self.flags["mem-fraction-static"])) * self.capacity - self.weights

    @property
    def state_slots(self) -> int | None:
        """Requests whose states fit; None: the model has no such state."""
        each = self.model.state_bytes_per_request(CONV_BYTES, self.width)
        return None if each == 0 else max(0, int(self.rest * STATE_SHARE // each))

    @property
    def states(self) -> float:
        return (self.state_slots or 0) * self.model.state_bytes_per_request(CONV_BYTES, self.width)

    @property
    def kv_tokens(self) -> int:
        each = self.model.kv_bytes_per_token(self.item, self.width)
        fitting = max(0, int((self.rest - self.states) // each))
        limit = self.flags.get("max-total-tokens")
        return fitting if limit is None else min(fitting, int(str(limit)))

    @property
    def full_length_requests(self) -> int:
        """Completions of the full length that one engine can hold at once."""
        rollout = self.config.rollout
        by_cache = self.kv_tokens // (rollout.max_prompt_tokens + rollout.max_completion_tokens)
        return by_cache if self.state_slots is None else min(by_cache, self.state_slots)

    def caches(self) -> Items:
        items: Items = {"KV cache": self.kv_tokens * self.model.kv_bytes_per_token(self.item, self.width)}
        if self.model.linear is not None:
            items["recurrent states"] = self.states
        return items

    def serving(self) -> Items:
        return {"engine weights": self.weights, **self.caches(), **self.working(), **self.staying()}

    def receiving(self, bucket: float) -> Items:
        """What is there during a push in which the caches are away: weights, and a bucket with the loader's copy."""
        return {"engine weights": self.weights, "received bucket": 2 * bucket, **self.staying()}

    def staying(self) -> Items:
        """What no release frees."""
        return {"engine runtime": self.device.engine_runtime_gib * GIB}

    def working(self) -> Items:
        """Activations of a prefill chunk, and float32 logits twice (they become log-probabilities)."""
        model = self.model
        chunk = int(str(self.flags.get("chunked-prefill-size") or DEFAULT_PREFILL))
        chunk = min(chunk, self.kv_tokens) if self.kv_tokens else chunk
        requests = int(str(self.flags.get("max-running-requests") or RUNNING_REQUESTS))
        tensors = chunk * (4 * model.hidden + 3 * model.ffn / self.width) * self.item
        return {"engine activations": tensors + 2 * 4 * requests * model.vocabulary}
