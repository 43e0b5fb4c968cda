"""Prompts: where they come from, in which order, and where we stand.

`build.build` is the door: it hands back the training stream (a `PromptCursor`) and the evaluation sets.
"""
