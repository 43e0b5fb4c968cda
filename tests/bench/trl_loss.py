"""Losses and gradients that TRL's GRPOTrainer computes for given completions, in the environment of trl_grpo.py.

    peer/bin/python tests/bench/trl_loss.py TASK

Generation is replaced, by a `rollout_func`; all that follows is TRL's own: advantages, old and reference
log-probabilities, corrections, masks, accumulation over microbatches, and updates by plain SGD. In float64 its head is
replaced too, which computes and accumulates in float32 whatever the model's dtype. TASK is a JSON file of
tests/real_models/test_trl.py. Writes into its folder `found.json` (`losses` of the microbatches, `advantages` of the
completions), `update_N.safetensors` with the gradients and, with adapters, `adapter` with their initial values.
Imports nothing from this application.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl.trainer.grpo_trainer
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Gradients(TrainerCallback):
    """Saves the gradients before each update, and sets its learning rate."""

    def __init__(self, folder: Path, rates: list[float]) -> None:
        self.folder = folder
        self.rates = rates

    def on_pre_optimizer_step(
        self, _: object, state: Any, control: object, model: Any, optimizer: Any, **__: object
    ) -> None:
        named = ((name.replace(".default", ""), each.grad) for name, each in model.named_parameters())
        gradients = {name: gradient.clone() for name, gradient in named if gradient is not None}
        save_file(gradients, self.folder / f"update_{state.global_step}.safetensors")
        for parameters in optimizer.param_groups:
            parameters["lr"] = self.rates[state.global_step]


class RecordingTrainer(GRPOTrainer):
    """Records the loss of each microbatch, as it is accumulated."""

    losses: list[float]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, *_: object
) -> tuple[Tensor | None, ...]:
    """Return the log-probability of each target and the entropies, [N], by their definition, and no other output."""
    logprobs = (linear(hidden, weight, bias) / temperature).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies, None, None, None


def main() -> None:
    path = Path(sys.argv[1])
    task = json.loads(path.read_text())
    rollout = {name: task[name] for name in ("prompt_ids", "completion_ids", "logprobs")}
    prompts = len(task["rewards"]) // task["config"]["num_generations"]
    lora = LoraConfig(**task["lora"], target_modules="all-linear", init_lora_weights=False) if task["lora"] else None

    # TRL deals the completions at random to the updates; in order, both sides update with the same ones.
    trl.trainer.grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    if task["dtype"] == "float64":
        trl.trainer.utils._ChunkedLogProbFunction = SimpleNamespace(apply=whole_logits)
    trainer = RecordingTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=task["dtype"]),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        reward_funcs=lambda **_: task["rewards"],
        rollout_func=lambda *_: rollout,
        callbacks=[Gradients(path.parent, task["learning_rates"])],
        peft_config=lora,
        train_dataset=Dataset.from_dict({"prompt": ["a prompt"] * prompts}),
        args=GRPOConfig(output_dir=tempfile.mkdtemp(), **task["config"]),
    )
    trainer.losses = []
    if task["corrected"]:  # TRL corrects the log-probabilities of vLLM alone
        trainer.use_vllm = True  # after the constructor, which would start one
        trainer._last_loaded_step = 0  # nothing to sync
    if lora is not None:
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(0.02)  # close to the model that sampled
        trainer.model.save_pretrained(path.parent / "adapter")

    trainer.train()
    found = {"losses": trainer.losses, "advantages": list(trainer._logs["advantages"])}
    (path.parent / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
