"""RL algorithms as orthogonal settings: GRPO, DAPO, Dr. GRPO and GSPO share one advantage and one loss.

`algorithm=X` is values only (`conf/algorithm/X.yaml`). The clip is in `objective.py`, the penalty of overlong answers
in `overlong.py`, dynamic sampling in `filter.py`. `prompts_per_step` and `group_size` act in `app/placement/`,
`updates_per_step` in `app/trainer/step.py`.
"""
