"""Qwen3 and Qwen3.5, and what drafts for them."""

from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from sglang.srt.models.qwen3_5_mtp import Qwen3_5ForCausalLMMTP
from sglang.srt.models.qwen3_5_text import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

EntryClass = [  # the name that SGLang looks for
    Qwen3ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5ForCausalLMMTP,
    LlamaForCausalLMEagle3,
]
