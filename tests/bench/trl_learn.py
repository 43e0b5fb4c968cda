"""One run of tests/bench/to_accuracy.py by TRL's GRPOTrainer, in the environment of trl_grpo.py.

    peer/bin/python tests/bench/trl_learn.py TASK

TASK is a JSON file of to_accuracy.py: `model`, `train` and `evals` (messages, token ids and answer of each prompt),
`judge` (a command that answers each JSON line of answers and texts with their rewards), `eval_every` and the arguments
of GRPOConfig. Prints one JSON line: the evaluations, greedy, each with its beginning and its duration. Imports nothing
from this application.
"""

import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Judge:
    """Scores texts in a process of the application, so that both sides have the same reward."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, answers: list[str], texts: list[str]) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([answers, texts]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


class Evaluations(TrainerCallback):
    """Evaluates before the first step, every few steps and after the last one, all prompts in one batch."""

    def __init__(self, task: dict[str, Any], tokenizer: Any, judge: Judge) -> None:
        self.every, self.tokenizer, self.judge = task["eval_every"], tokenizer, judge
        self.answers = [each["answer"] for each in task["evals"]]
        ids = {"input_ids": [each["ids"] for each in task["evals"]]}
        self.batch = tokenizer.pad(ids, padding_side="left", return_tensors="pt")
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        self.greedy = GenerationConfig(do_sample=False, max_new_tokens=task["config"]["max_completion_length"], **ends)
        self.found: list[dict[str, float]] = []

    def on_train_begin(self, _: Any, state: Any, control: Any, model: Any, **__: Any) -> None:
        self.evaluate(0, model)

    def on_step_end(self, _: Any, state: Any, control: Any, model: Any, **__: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.evaluate(state.global_step, model)

    def evaluate(self, step: int, model: Any) -> None:
        began = time.time()
        model.eval()
        with torch.no_grad():
            tokens = model.generate(**self.batch, generation_config=self.greedy)[:, self.batch["input_ids"].shape[1] :]
        model.train()
        rewards = self.judge(self.answers, self.tokenizer.batch_decode(tokens, skip_special_tokens=True))
        accuracy = sum(each == 1 for each in rewards) / len(rewards)
        self.found.append({"step": step, "accuracy": accuracy, "began": began, "seconds": time.time() - began})


def main() -> None:
    with open(sys.argv[1]) as file:
        task = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    for each in task["train"][:8]:
        assert tokenizer.apply_chat_template(each["messages"], add_generation_prompt=True).input_ids == each["ids"]

    judge = Judge(task["judge"])

    def reward(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        return judge(answer, [completion[0]["content"] for completion in completions])

    evaluations = Evaluations(task, tokenizer, judge)
    rows = {
        "prompt": [each["messages"] for each in task["train"]],
        "answer": [each["answer"] for each in task["train"]],
    }
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype="float32"),
        processing_class=tokenizer,
        reward_funcs=reward,
        callbacks=[evaluations],
        train_dataset=Dataset.from_dict(rows),
        args=GRPOConfig(output_dir=tempfile.mkdtemp(), **task["config"]),
    )
    trainer.train()
    versions = {package: version(package) for package in ("trl", "transformers", "torch")}
    print(json.dumps({"evaluations": evaluations.found, "versions": versions}))


if __name__ == "__main__":
    main()
