"""The baseline of real_models.py: TRL's GRPOTrainer with the same workload on a CPU, in an environment with TRL.

    python -m venv peer && peer/bin/pip install torch==2.13.0 trl==1.16.0 transformers datasets peft
    peer/bin/python tests/bench/trl_grpo.py --model FOLDER --prompts FILE --steps 8 --microbatch 8 …

Prints one JSON line: of each step the seconds, those of them spent generating, and the completion tokens. TRL generates
with transformers here; it can also use vLLM, which is not measured. Imports nothing from this application.
"""

import argparse
import json
import tempfile
import time
from importlib.metadata import version

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Measures the seconds of each optimizer step."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        now = time.perf_counter()
        if self.started is not None:
            self.seconds.append(now - self.started)
        self.started = now

    def on_train_end(self, *_: object, **__: object) -> None:
        assert self.started is not None
        self.seconds.append(time.perf_counter() - self.started)


class TimedTrainer(GRPOTrainer):
    """Measures the seconds of each generation, one a step."""

    generation_seconds: list[float]

    def _generate_single_turn(self, *args: object, **kwargs: object) -> object:
        started = time.perf_counter()
        generated = super()._generate_single_turn(*args, **kwargs)
        self.generation_seconds.append(time.perf_counter() - started)
        return generated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts-per-step", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True, help="trajectories of a forward and backward pass")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lora-rank", type=int, default=0, help="of PEFT's adapters on all linear layers; 0: none")
    args = parser.parse_args()
    with open(args.prompts) as file:
        questions = [json.loads(line)["question"] for line in file][: args.prompts_per_step * args.steps]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    clock = StepClock()
    completions = args.prompts_per_step * args.group_size
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=reward,
        callbacks=[clock],
        peft_config=LoraConfig(r=args.lora_rank, target_modules="all-linear") if args.lora_rank else None,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=args.dtype == "bfloat16",
            gradient_checkpointing=False,
            report_to="none",
            # All completions of a step are generated at once, whatever the microbatch is.
            per_device_train_batch_size=args.microbatch,
            gradient_accumulation_steps=completions // args.microbatch,
            num_generations=args.group_size,
            max_completion_length=args.max_tokens,
            max_steps=args.steps,
            learning_rate=1e-5,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.generation_seconds = []
    trainer.train()
    print(
        json.dumps(
            {
                "versions": {package: version(package) for package in ("trl", "transformers", "torch", "peft")},
                "threads": torch.get_num_threads(),
                "seconds": clock.seconds,
                "generation_seconds": trainer.generation_seconds,
                "completion_tokens": [
                    sum(lengths[start : start + completions]) for start in range(0, len(lengths), completions)
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
