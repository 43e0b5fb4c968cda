"""What settings of TRL, verl and the Hugging Face trainer are called here, for the hint at an unknown name."""

VALUE = "<value>"
COMPLETION = f"rollout.max_completion_tokens={VALUE}"
GROUP = f"algorithm.group_size={VALUE}"
KL = f"algorithm.kl=k3 algorithm.kl_coefficient={VALUE}"
MODEL = f"model=hf model.path={VALUE}"
PROMPTS = f"algorithm.prompts_per_step={VALUE}"
STEPS = f"steps={VALUE}"
TURNS = f"environment.max_turns={VALUE}"
WANDB = "tracking=wandb"

NAMES = {  # the end of a dotted name, and what to write instead
    "adv_estimator": f"algorithm={VALUE}",
    "batch_size": PROMPTS,
    "beta": KL,
    "environment.max_steps": TURNS,
    "epochs": STEPS,
    "eval_steps": f"eval.every={VALUE}",
    "experiment_name": f"tracking.run_name={VALUE}",
    "gradient_checkpointing": "trainer.activation_checkpointing=all",
    "kl_coef": KL,
    "learning_rate": f"trainer.lr={VALUE}",
    "lr": f"trainer.lr={VALUE}",
    "lr_scheduler_type": f"trainer.schedule={VALUE}",
    "max_assistant_turns": TURNS,
    "max_completion_length": COMPLETION,
    "max_prompt_length": f"rollout.max_prompt_tokens={VALUE}",
    "max_response_length": COMPLETION,
    "max_steps": STEPS,
    "model_name": MODEL,
    "model_name_or_path": MODEL,
    "num_generations": GROUP,
    "num_train_epochs": STEPS,
    "output_dir": f"hydra.run.dir={VALUE}",
    "project_name": f"tracking.project={VALUE}",
    "report_to": f"tracking={VALUE}",
    "rollout.n": GROUP,
    "save_freq": f"checkpoint.every={VALUE}",
    "save_steps": f"checkpoint.every={VALUE}",
    "temperature": f"rollout.temperature={VALUE}",
    "test_freq": f"eval.every={VALUE}",
    "total_epochs": STEPS,
    "train_batch_size": PROMPTS,
    "wandb": WANDB,
}
CONVERTED = {PROMPTS, STEPS}  # settings of another unit, so that the given value is not repeated


def here(key: str, value: str = VALUE) -> str | None:
    """Return what to write instead of a setting of another program; None if the name is not known.

    >>> here("actor_rollout_ref.rollout.n", "8"), here("trainer.total_epochs", "15"), here("seed")
    ('algorithm.group_size=8', 'steps=<value>', None)
    """
    words = key.split(".")
    ends = [".".join(words[start:]) for start in range(len(words))]
    found = next((NAMES[end] for end in ends if end in NAMES), None)
    return found if found is None or found in CONVERTED else found.replace(VALUE, value)
