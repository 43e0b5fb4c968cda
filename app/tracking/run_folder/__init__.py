"""The files of a run's folder."""

PROMPTS = "prompts.jsonl"  # prompt ids of each step
WARNINGS = "logs/warnings.jsonl"
CONFIG = "config"  # folder of the composed configuration
