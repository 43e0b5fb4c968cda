"""RL algorithms as orthogonal settings: GRPO, DAPO, Dr. GRPO and GSPO share one advantage and one loss.

`prompts_per_step`, `group_size` and dynamic sampling act in `app/placement/`, `updates_per_step` in
`app/trainer/step.py`.
"""
