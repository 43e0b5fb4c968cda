"""The policy as the trainer sees it: packed tokens in, log-probabilities of completion tokens out.

Always holds: a token sees its own sequence only; the head is applied to the positions asked for and nowhere else;
calling the `PolicyModel` itself (never what it wraps) is what makes FSDP2 gather its parameters.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from app.model.attention import PACKED, isolate_sequences
from app.model.lm_head import token_logprobs
from app.model.packing import Packing

LINEAR_ATTENTION = "linear_attention"


class PolicyModel(nn.Module):
    """A Hugging Face causal LM with its checkpoint's names. Made by `app.model.load.load`."""

    def __init__(self, causal_lm: Any, checkpoint_names: Mapping[str, str]) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.checkpoint_names = dict(checkpoint_names)  # parameter of `causal_lm` → name in its checkpoint
        self.attention: str = causal_lm.config._attn_implementation
        if self.attention == PACKED:
            for layer in self.layers:
                mixer = getattr(layer, "linear_attn", None)
                if isinstance(mixer, nn.Module):
                    isolate_sequences(mixer)

    @property
    def config(self) -> Any:
        """The text model's Hugging Face configuration."""
        return self.causal_lm.config.get_text_config()

    @property
    def layers(self) -> nn.ModuleList:
        return self.causal_lm.get_decoder().layers

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        logit_positions: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        chunk_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of N tokens, both [N] float32, at `temperature`.

        `input_ids` and `position_ids` [1, T] int64 hold S sequences end to end, positions from 0 in each;
        `cu_seqlens` [S + 1] their borders; `logit_positions` [N] the places in 0..T whose hidden state predicts the tokens
        `targets` [N] (a token's predecessor). The entropy is a metric, without a gradient, unless asked for.
        """
        packing = Packing.of(cu_seqlens)
        hidden = self.causal_lm.get_decoder()(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **self._borders(packing)
        ).last_hidden_state
        chosen = hidden.squeeze(0).index_select(0, logit_positions)
        return token_logprobs(
            chosen,
            self.causal_lm.lm_head.weight,
            targets,
            temperature,
            entropy_gradient=entropy_gradient,
            chunk_tokens=chunk_tokens,
        )

    def _borders(self, packing: Packing) -> dict[str, Any]:
        """The borders in the words of the attention in use."""
        if self.attention == PACKED:
            return {"packing": packing}
        return {
            "cu_seq_lens_q": packing.cu_seqlens,
            "cu_seq_lens_k": packing.cu_seqlens,
            "max_length_q": packing.longest,
            "max_length_k": packing.longest,
        }


def packs_sequences(config: Any, attention: str = PACKED) -> bool:
    """Whether a `PolicyModel` of this configuration may be given several sequences at once.

    Full attention always; linear attention where `isolate_sequences` is at work, since varlen kernels for it (fla,
    causal-conv1d) come and go with the installation, and without them borders would be ignored silently.
    """
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return attention == PACKED or LINEAR_ATTENTION not in kinds


def named_checkpoint_tensors(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(source checkpoint's name, parameter or its DTensor) in model order; a tied head comes once, as embedding."""
    for name, parameter in model.causal_lm.named_parameters():
        yield model.checkpoint_names[name], parameter
