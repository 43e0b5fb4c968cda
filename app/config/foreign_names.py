"""Settings of TRL, verl, prime-rl, slime and the Hugging Face trainer: what to write here, or why there is nothing.

The answers to an unknown setting, and the tables of `docs/coming_from.md`.
"""

VALUE = "<value>"
CLIP = f"algorithm.clip_low={VALUE} algorithm.clip_high={VALUE}"
COMPLETION = f"rollout.max_completion_tokens={VALUE}"
DEVICES = f"placement.devices={VALUE}"
FOLDER = f"hydra.run.dir={VALUE}"
GROUP = f"algorithm.group_size={VALUE}"
KL = f"algorithm.kl=k3 algorithm.kl_coefficient={VALUE}"
LORA = f"model.lora.rank={VALUE}"
MICROBATCH = f"trainer.tokens_per_microbatch={VALUE}"
MODEL = f"model=hf model.path={VALUE}"
PROMPT = f"rollout.max_prompt_tokens={VALUE}"
PROMPTS = f"algorithm.prompts_per_step={VALUE}"
REWARD = "reward._target_=my_module.my_reward"
RUN_NAME = f"tracking.run_name={VALUE}"
STEPS = f"steps={VALUE}"
TRACKERS = f"tracking={VALUE}"
TURNS = f"environment.max_turns={VALUE}"
UPDATES = f"algorithm.updates_per_step={VALUE}"
WANDB = "tracking=wandb"

NAMES = {  # the end of a dotted name, and what to write instead
    "actor_num_gpus_per_node": f"placement.trainer_devices={VALUE}",
    "actor_rollout_ref.model.path": MODEL,
    "adv_estimator": f"algorithm={VALUE}",
    "advantage_estimator": f"algorithm={VALUE}",
    "algo": f"algorithm={VALUE}",
    "batch_size": PROMPTS,
    "beta": KL,
    "bf16": "device.dtype=bfloat16",
    "checkpoint.dir": FOLDER,
    "ckpt.interval": f"checkpoint.every={VALUE}",
    "clip_ratio": CLIP,
    "clip_ratio_c": f"algorithm.dual_clip={VALUE}",
    "clip_ratio_high": f"algorithm.clip_high={VALUE}",
    "clip_ratio_low": f"algorithm.clip_low={VALUE}",
    "colocate": "placement=colocate",
    "custom_reward_function.name": REWARD,
    "custom_reward_function.path": REWARD,
    "dataset_name": f"data.path={VALUE}",
    "default_local_dir": FOLDER,
    "entropy_coef": f"algorithm.entropy_coefficient={VALUE}",
    "entropy_coeff": f"algorithm.entropy_coefficient={VALUE}",
    "environment.max_steps": TURNS,
    "eps_clip": CLIP,
    "eps_clip_high": f"algorithm.clip_high={VALUE}",
    "epsilon": CLIP,
    "epsilon_high": f"algorithm.clip_high={VALUE}",
    "epochs": STEPS,
    "eval_prompt_data": f"data.eval_path={VALUE}",
    "eval_steps": f"eval.every={VALUE}",
    "exp_name": RUN_NAME,
    "experiment_name": RUN_NAME,
    "filter_groups.enable": f"algorithm.dynamic_sampling={VALUE}",
    "gpu_memory_utilization": f"rollout.memory_fraction={VALUE}",
    "gpus": DEVICES,
    "grad_clip": f"trainer.max_grad_norm={VALUE}",
    "gradient_accumulation_steps": MICROBATCH,
    "gradient_checkpointing": "trainer.activation_checkpointing=all",
    "hf_checkpoint": MODEL,
    "kl_coef": KL,
    "kl_loss_coef": KL,
    "learning_rate": f"trainer.lr={VALUE}",
    "load": f"resume={VALUE}",
    "log_dir": FOLDER,
    "logger": TRACKERS,
    "lora_alpha": f"model.lora.alpha={VALUE}",
    "lora_r": LORA,
    "lora_rank": LORA,
    "lora_target_modules": f"model.lora.targets={VALUE}",
    "loss_agg_mode": f"algorithm.aggregation={VALUE}",
    "loss_type": f"algorithm.aggregation={VALUE}",
    "lr": f"trainer.lr={VALUE}",
    "lr_scheduler_type": f"trainer.schedule={VALUE}",
    "mask_truncated_completions": f"algorithm.mask_truncated={VALUE}",
    "max_assistant_turns": TURNS,
    "max_async_level": f"placement.max_staleness={VALUE}",
    "max_completion_length": COMPLETION,
    "max_new_tokens": COMPLETION,
    "max_prompt_length": PROMPT,
    "max_response_length": COMPLETION,
    "max_steps": STEPS,
    "max_tokens": COMPLETION,
    "micro_batch_size": MICROBATCH,
    "model_name": MODEL,
    "model_name_or_path": MODEL,
    "n_gpus_per_node": DEVICES,
    "n_samples_per_prompt": GROUP,
    "norm_adv_by_std_in_grpo": f"algorithm.normalize_by_std={VALUE}",
    "num_generations": GROUP,
    "num_iterations": UPDATES,
    "num_rollout": STEPS,
    "num_train_epochs": STEPS,
    "out": FOLDER,
    "output_dir": FOLDER,
    "per_device_train_batch_size": MICROBATCH,
    "ppo_epochs": UPDATES,
    "ppo_max_token_len_per_gpu": MICROBATCH,
    "ppo_micro_batch_size_per_gpu": MICROBATCH,
    "ppo_mini_batch_size": UPDATES,
    "project_name": f"tracking.project={VALUE}",
    "prompt_data": f"data.path={VALUE}",
    "prompt_key": f"data.question={VALUE}",
    "report_to": TRACKERS,
    "resume_from_checkpoint": f"resume={VALUE}",
    "resume_mode": f"resume={VALUE}",
    "reward_funcs": REWARD,
    "rollout.n": GROUP,
    "rollout_batch_size": PROMPTS,
    "rollout_max_response_len": COMPLETION,
    "rollout_num_gpus": f"placement.rollout_devices={VALUE}",
    "rollout_num_gpus_per_engine": f"rollout.tensor_parallel={VALUE}",
    "rollouts_per_example": GROUP,
    "run_dir": FOLDER,
    "run_name": RUN_NAME,
    "save_dir": FOLDER,
    "save_freq": f"checkpoint.every={VALUE}",
    "save_interval": f"checkpoint.every={VALUE}",
    "save_steps": f"checkpoint.every={VALUE}",
    "scale_rewards": f"algorithm.normalize_by_std={VALUE}",
    "seq_len": COMPLETION,
    "target_modules": f"model.lora.targets={VALUE}",
    "temperature": f"rollout.temperature={VALUE}",
    "tensor_model_parallel_size": f"rollout.tensor_parallel={VALUE}",
    "test_freq": f"eval.every={VALUE}",
    "total_epochs": STEPS,
    "train_batch_size": PROMPTS,
    "train_files": f"data.path={VALUE}",
    "truncated_importance_sampling": "algorithm.correction=tis",
    "use_kl_loss": "algorithm.kl=k3",
    "use_lora": LORA,
    "use_peft": LORA,
    "use_tis": "algorithm.correction=tis",
    "use_wandb": WANDB,
    "val_before_train": f"eval.before_train={VALUE}",
    "val_files": f"data.eval_path={VALUE}",
    "wandb": WANDB,
    "wandb.name": RUN_NAME,
    "wandb.project": f"tracking.project={VALUE}",
    "warmup_ratio": f"trainer.warmup_steps={VALUE}",
}
# Settings of another unit or with other choices: the given value is not repeated.
CONVERTED = {LORA, MICROBATCH, PROMPTS, STEPS, UPDATES} | {
    NAMES[name] for name in ("loss_type", "resume_mode", "scale_rewards", "warmup_ratio")
}

CRITIC = "there is no critic: advantages compare the completions of a group"
NODES = "nodes join through Ray: start them with launch/ray_cluster.sh or launch/slurm.sbatch, or set cluster.address"
PARALLEL = "FSDP2 shards the trainer over placement.trainer_devices; there is no other parallelism of the trainer"
SEQUENCE_PARALLEL = "there is no sequence parallelism: a sequence is trained on one device, as mode=plan checks"
VLLM = "there is no vLLM backend: SGLang generates; its flags are +rollout.engine_args.<flag>=<value>"

ABSENT = {  # the end of a dotted name, and why there is no such setting
    "context_parallel_size": SEQUENCE_PARALLEL,
    "cp": SEQUENCE_PARALLEL,
    "critic": CRITIC,
    "expert_model_parallel_size": PARALLEL,
    "expert_parallel": PARALLEL,
    "gae_lambda": CRITIC,
    "gamma": CRITIC,
    "lam": CRITIC,
    "load_in_4bit": "there is no quantized training: model.lora.rank is what saves memory",
    "load_in_8bit": "there is no quantized training: model.lora.rank is what saves memory",
    "logging_steps": "every step is logged",
    "megatron": PARALLEL,
    "nnodes": NODES,
    "num_nodes": NODES,
    "pipeline_model_parallel_size": PARALLEL,
    "push_to_hub": "a run leaves a Hugging Face directory: hf upload <repository> <run>/export",
    "ref_model": "the reference policy is the model that the run starts from: algorithm.kl=k3 computes it",
    "reward_model": "a reward model is a reward function that asks its server: reward._target_=my_module.my_reward",
    "rollout.name": VLLM,
    "sft": "there is no supervised stage: start from a model that is tuned already, with model.path=<directory>",
    "ulysses_sequence_parallel_size": SEQUENCE_PARALLEL,
    "use_vllm": VLLM,
    "vllm": VLLM,
    "vllm_gpu_memory_utilization": VLLM,
    "vllm_mode": VLLM,
}
CHOICES = {  # choices of a group that other programs have
    "algorithm=gae": CRITIC,
    "algorithm=ppo": CRITIC,
    "algorithm=reinforce": "algorithm.normalize_by_std=false with algorithm=grpo subtracts the group's mean alone",
    "algorithm=reinforce++": "REINFORCE++ normalizes over a whole step, which streaming cannot",
    "algorithm=rloo": "algorithm.normalize_by_std=false with algorithm=grpo is RLOO up to a constant factor",
    "device=gpu": "write device=cuda",
}


def answer(key: str, value: str = VALUE) -> str | None:
    """Return what to write instead of a setting of another program, or why there is none; None for an unknown name.

    >>> answer("actor_rollout_ref.rollout.n", "8"), answer("trainer.total_epochs", "15"), answer("seed")
    ('write algorithm.group_size=8', 'write steps=<value>', None)
    >>> answer("use_vllm", "true")
    'there is no vLLM backend: SGLang generates; its flags are +rollout.engine_args.<flag>=<value>'
    """
    words = key.replace("-", "_").split(".")
    for start in range(len(words)):
        end = ".".join(words[start:])
        if end in ABSENT:
            return ABSENT[end]
        if end in NAMES:
            found = NAMES[end]
            return f"write {found if found in CONVERTED else found.replace(VALUE, value)}"
    return None
