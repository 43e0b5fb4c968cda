"""RL algorithms as orthogonal settings: GRPO, DAPO, Dr. GRPO and GSPO share one advantage and one loss."""
