"""Evaluation on held-out prompts. `eval.every` and `eval.before_train` act in `app/placement/controller.py`."""
