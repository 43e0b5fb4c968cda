"""Prompts: loading, templating, tokenization, and the resumable order in which they are dispatched.

`prompts.build` is the entry point. It returns the training stream (a `PromptCursor`) and the evaluation sets. `rows.py`
chooses the sets, `records.py` reads files and hub data sets.
"""
