"""Settings of TRL, verl, prime-rl, slime, the Hugging Face trainer and earlier versions: what to write, or why nothing.

They answer an unknown setting, and agree with the tables of `docs/coming_from.md`.
"""

VALUE = "<value>"

AGGREGATION = f"algorithm.aggregation={VALUE}"
LORA = f"model.lora.rank={VALUE}"
MICROBATCH = f"trainer.tokens_per_microbatch={VALUE}"
NORMALIZE = f"algorithm.normalize_by_std={VALUE}"
PROMPTS = f"algorithm.prompts_per_step={VALUE}"
RESUME = f"resume={VALUE}"
STEPS = f"steps={VALUE}"
UPDATES = f"algorithm.updates_per_step={VALUE}"
WARMUP = f"trainer.warmup_steps={VALUE}"
# Settings of another unit or with other choices: the given value is not repeated.
CONVERTED = {AGGREGATION, LORA, MICROBATCH, NORMALIZE, PROMPTS, RESUME, STEPS, UPDATES, WARMUP}

WRITTEN = {  # what to write, and the ends of the dotted names of other programs
    AGGREGATION: "loss_agg_mode loss_type",
    f"algorithm.clip_high={VALUE}": "clip_ratio_high eps_clip_high epsilon_high",
    f"algorithm.clip_low={VALUE}": "clip_ratio_low",
    f"algorithm.clip_low={VALUE} algorithm.clip_high={VALUE}": "clip_ratio eps_clip epsilon",
    "algorithm.correction=tis": "truncated_importance_sampling use_tis",
    f"algorithm.dual_clip={VALUE}": "clip_ratio_c",
    f"algorithm.dynamic_sampling={VALUE}": "filter_groups.enable",
    f"algorithm.entropy_coefficient={VALUE}": "entropy_coef entropy_coeff",
    f"algorithm.group_size={VALUE}": "n_samples_per_prompt num_generations rollout.n rollouts_per_example",
    "algorithm.kl=k3": "use_kl_loss",
    f"algorithm.kl=k3 algorithm.kl_coefficient={VALUE}": "beta kl_coef kl_loss_coef",
    f"algorithm.mask_truncated={VALUE}": "mask_truncated_completions",
    NORMALIZE: "norm_adv_by_std_in_grpo scale_rewards",
    PROMPTS: "batch_size rollout_batch_size train_batch_size",
    UPDATES: "num_iterations ppo_epochs ppo_mini_batch_size",
    f"algorithm={VALUE}": "adv_estimator advantage_estimator algo",
    f"checkpoint.every={VALUE}": "ckpt.interval save_freq save_interval save_steps",
    f"checkpoint.keep={VALUE}": "save_total_limit",
    f"data.eval_path={VALUE}": "eval_prompt_data val_files",
    f"data.path={VALUE}": "dataset_name prompt_data train_files",
    f"data.question={VALUE}": "prompt prompt_key",
    f"data.system={VALUE}": "system_prompt",
    "device.dtype=bfloat16": "bf16 fp16",
    f"epochs={VALUE}": "num_train_epochs total_epochs",
    f"environment.max_turns={VALUE}": "environment.max_steps max_assistant_turns",
    f"eval.before_train={VALUE}": "val_before_train",
    f"eval.every={VALUE}": "eval_steps eval_strategy test_freq",
    f"eval.min_p={VALUE}": "eval_min_p val_kwargs.min_p",
    f"eval.top_k={VALUE}": "eval_top_k val_kwargs.top_k",
    f"eval.top_p={VALUE}": "eval_top_p val_kwargs.top_p",
    f"hydra.run.dir={VALUE}": "checkpoint.dir default_local_dir log_dir out output_dir run_dir save_dir",
    f"model.lora.alpha={VALUE}": "lora_alpha",
    LORA: "lora_r lora_rank use_lora use_peft",
    f"model.lora.targets={VALUE}": "lora_target_modules target_modules",
    f"model=hf model.path={VALUE}": "actor_rollout_ref.model.path hf_checkpoint model_name model_name_or_path",
    f"placement.devices={VALUE}": "gpu gpus n_gpus_per_node",
    f"placement.max_staleness={VALUE}": "max_async_level",
    f"placement.rollout_devices={VALUE}": "rollout_num_gpus",
    f"placement.trainer_devices={VALUE}": "actor_num_gpus_per_node",
    "placement=colocate": "colocate",
    RESUME: "load resume_from_checkpoint resume_mode",
    "reward._target_=my_module.my_reward": "custom_reward_function.name custom_reward_function.path reward_funcs",
    f"rollout.max_completion_tokens={VALUE}": (
        "max_completion_length max_length max_new_tokens max_response_length max_tokens rollout_max_response_len "
        "seq_len"
    ),
    f"rollout.max_prompt_tokens={VALUE}": "max_prompt_length",
    f"rollout.memory_fraction={VALUE}": "gpu_memory_utilization",
    f"rollout.stop={VALUE}": "rollout_stop stop stop_strings",
    f"rollout.temperature={VALUE}": "temperature",
    f"rollout.tensor_parallel={VALUE}": "rollout_num_gpus_per_engine tensor_model_parallel_size",
    f"seed={VALUE}": "seed_everything",
    STEPS: "max_steps num_rollout",
    f"tracking.project={VALUE}": "project_name wandb.project",
    f"tracking.run_name={VALUE}": "exp_name experiment_name run_name wandb.name",
    f"tracking={VALUE}": "logger report_to",
    "tracking=wandb": "use_wandb wandb",
    "trainer.activation_checkpointing=all": "gradient_checkpointing",
    f"trainer.lr={VALUE}": "learning_rate lr",
    f"trainer.max_grad_norm={VALUE}": "grad_clip",
    f"trainer.schedule={VALUE}": "lr_scheduler_type",
    MICROBATCH: (
        "gradient_accumulation_steps micro_batch_size per_device_train_batch_size ppo_max_token_len_per_gpu "
        "ppo_micro_batch_size_per_gpu"
    ),
    WARMUP: "warmup_ratio",
}
NAMES = {name: written for written, names in WRITTEN.items() for name in names.split()}

CRITIC = "there is no critic: advantages compare the completions of a group"
CUT = (
    "engines report log-probabilities before a cut or a penalty, so training would correct for the wrong policy; "
    "evaluations have eval.top_k, eval.min_p and eval.top_p"
)
NODES = "nodes join through Ray: start them with launch/ray_cluster.sh or launch/slurm.sbatch, or set cluster.address"
PARALLEL = "FSDP2 shards the trainer over placement.trainer_devices; there is no other parallelism of the trainer"
SEQUENCE_PARALLEL = "there is no sequence parallelism: a sequence is trained on one device, as mode=plan checks"
SFT = "a supervised run is mode=sft data.path=<rows with replies>"
VLLM = "there is no vLLM backend: SGLang generates; its flags are +rollout.engine_args.<flag>=<value>"

REASONS = {  # why there is no such setting, and the ends of its names
    SEQUENCE_PARALLEL: "context_parallel_size cp ulysses_sequence_parallel_size",
    CUT: "min_p rollout_top_k top_k top_p",
    CRITIC: "critic gae_lambda gamma lam",
    PARALLEL: "expert_model_parallel_size expert_parallel megatron pipeline_model_parallel_size",
    "there is no quantized training: model.lora.rank is what saves memory": (
        "fp8 load_in_4bit load_in_8bit quantization"
    ),
    "there is no other optimizer than AdamW": "optim",
    "a penalty would sample from another distribution than the one that is trained": (
        "frequency_penalty presence_penalty repetition_penalty"
    ),
    "every step is logged": "logging_steps",
    NODES: "nnodes num_nodes",
    "a run leaves a Hugging Face directory: hf upload <repository> <run>/export": "hub_model_id push_to_hub",
    "the reference policy is the model that the run starts from: algorithm.kl=k3 computes it": "ref_model",
    "a reward model is a reward that asks its server: reward._target_=my_reward_model.RewardModel": (
        "reward_model reward_model.enable reward_model.path reward_model.model.path"
    ),
    VLLM: "rollout.name use_vllm vllm vllm_gpu_memory_utilization vllm_mode",
    "the tiny models come with their weights and have no settings: write model=tiny, tiny_qwen35 or tiny_tools": (
        "model.tiny model.tiny.accuracy_high model.tiny.accuracy_low model.tiny.cache model.tiny.family "
        "model.tiny.heads model.tiny.hidden model.tiny.layers model.tiny.skill"
    ),
    SFT: "sft",
}
ABSENT = {name: reason for reason, names in REASONS.items() for name in names.split()}
CHOICES = {  # choices of a group, and values of a setting, that other programs have
    "algorithm=ppo": CRITIC,
    "algorithm=reinforce++": "REINFORCE++ normalizes over a whole step, which streaming cannot",
    "device=mps": "there is no backend for Apple GPUs: device=cpu runs everywhere",
    "placement=async": "write placement=fully_async",
}


def answer(key: str, value: str = VALUE) -> str | None:
    """Return what to write instead of a setting of another program, or why there is none; None for an unknown name.

    >>> answer("actor_rollout_ref.rollout.n", "8"), answer("trainer.total_epochs", "15"), answer("seed")
    ('write algorithm.group_size=8', 'write epochs=15', None)
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
