"""The trained policy: packed tokens in, log-probabilities of completion tokens out.

Invariants:
- A token attends to its own sequence only.
- The LM head is applied to the requested positions only.
- Callers call the `PolicyModel` itself, never the wrapped model: its forward hook is where FSDP2 gathers parameters.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from app.model.attention import mix_packed
from app.model.kernels import CPU_KERNELS, Kernels, chunk_shape, compile_elementwise, fuse_elementwise
from app.model.lm_head import token_logprobs
from app.model.lora.layer import is_adapter
from app.model.lora.names import adapter_tensors
from app.model.packing import Packing

LINEAR_ATTENTION = "linear_attention"
# Decays of linear attention, in float32 in the trainer: their exponential amplifies bf16 rounding. They are synced in
# float32; an engine keeps A_log so, and rounds dt_bias to its own dtype.
FLOAT32_PARAMETERS = ("A_log", "dt_bias")


class PolicyModel(nn.Module):
    """A Hugging Face causal LM with the tensor names of its checkpoint. Built by `app.model.load.load`."""

    def __init__(self, causal_lm: Any, checkpoint_names: Mapping[str, str], kernels: Kernels = CPU_KERNELS) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        # Name of a `causal_lm` parameter → name in the checkpoint.
        self.checkpoint_names = dict(checkpoint_names)
        self.kernels = kernels
        # FSDP2 gathers a module's parameters when the module is called.
        causal_lm.lm_head.forward = partial(_head_logprobs, causal_lm.lm_head, kernels)
        if kernels.compiled:
            compile_elementwise(causal_lm.get_decoder())
        if kernels.elementwise is not None:
            fuse_elementwise(causal_lm.get_decoder(), kernels.elementwise)
        for layer in self.layers:
            mixer = getattr(layer, "linear_attn", None)
            if isinstance(mixer, nn.Module):
                mix_packed(mixer, kernels.linear)

    @property
    def config(self) -> Any:
        """Hugging Face configuration of the text model."""
        return self.causal_lm.config.get_text_config()

    @property
    def layers(self) -> nn.ModuleList:
        return self.causal_lm.get_decoder().layers

    @property
    def heads(self) -> tuple[int, int, int]:
        """Attention heads of queries, of keys and values, and their width."""
        number = self.config.num_attention_heads
        shared = getattr(self.config, "num_key_value_heads", None) or number
        return number, shared, getattr(self.config, "head_dim", None) or self.config.hidden_size // number

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packing: Packing,
        logit_positions: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        chunk_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies of N target tokens, both [N] float32.

        Args:
            input_ids: [1, T] int64, S sequences packed end to end.
            position_ids: [1, T] int64, starting at 0 in each sequence.
            logit_positions: [N] int64, positions in 0..T whose hidden states predict the targets (their predecessors).
            targets: [N] int64.
            entropy_gradient: Whether the entropy carries a gradient; without, it is only a metric.
            chunk_tokens: Tokens per chunk of the LM head; by default see `Kernels`.
        """
        hidden = self.causal_lm.get_decoder()(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            packing=packing,
            attention_kernel=self.kernels.attention,
        ).last_hidden_state

        logprobs, entropies = self.causal_lm.lm_head(
            hidden.squeeze(0).index_select(0, logit_positions),
            targets,
            temperature,
            entropy_gradient=entropy_gradient,
            chunk_tokens=chunk_tokens,
            # FSDP2 takes the gradients of gathered parameters from autograd.
            adds_to_grad=not isinstance(self, FSDPModule),
        )
        return logprobs, entropies


def _head_logprobs(
    head: Any, kernels: Kernels, hidden: Tensor, *given: Any, chunk_tokens: int | None, **options: Any
) -> tuple[Tensor, Tensor]:
    tokens, columns = chunk_shape(kernels, head.weight)
    options |= {"chunk_tokens": chunk_tokens or tokens, "chunk_vocabulary": columns, "compiled": kernels.compiled}
    return token_logprobs(hidden, head.weight, *given, **options)


def named_checkpoint_tensors(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, parameter or DTensor) in model order. A tied head appears once, as the embedding.

    With adapters these are the base model's parameters.
    """
    for name, parameter in model.causal_lm.named_parameters():
        if not is_adapter(name):
            yield model.checkpoint_names[name], parameter


def named_trained_tensors(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield what training changes: the adapters by PEFT's names, or without them all tensors of the checkpoint."""
    adapters = list(adapter_tensors(model))
    yield from adapters or named_checkpoint_tensors(model)
