"""verifiers 0.2.1: an environment with a tool."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def load_environment(groups: bool = False, **kwargs):
    def correct(completion, answer) -> float:
        return float(completion[-1]["content"].strip() == answer)

    def best(completions) -> list[float]:
        return [1.0 for _ in completions]

    rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(3)]
    rubric = vf.Rubric(funcs=[best if groups else correct])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=rubric, **kwargs)
