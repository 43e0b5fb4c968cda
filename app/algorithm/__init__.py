"""GRPO, DAPO and their relatives as few orthogonal settings."""
