"""Qwen3 and Qwen3.5."""

from sglang.srt.models import qwen3, qwen3_5, qwen3_5_text

EntryClass = [qwen3.EntryClass, *qwen3_5.EntryClass, *qwen3_5_text.EntryClass]  # the name that SGLang looks for
