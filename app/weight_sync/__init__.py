"""The checkpoint-engine weight sync: the trainer's parameters into every engine."""
