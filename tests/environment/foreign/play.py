"""Run by a foreign interpreter: load an environment as a worker does, and play episodes with a scripted policy.

stdin: {"kind", "settings", "model", "episodes": [{"row", "script": [what the policy says, or {"over": "tokens"}]}]}
last line of stdout: {"refused"} or {"info", "episodes": [{"scores"} or {"over"} or {"error"}, "strands", "said"}]}
"""

import asyncio
import importlib
import json
import sys
from typing import Any

from app.environment.protocol import EpisodeOver, OutOfTokens, OutOfTurns, Task
from app.utils.dotted_path import LoadError
from tests.environment.scripted_policy import ScriptedPolicy

OVER = {"tokens": OutOfTokens, "turns": OutOfTurns}


class TokenPolicy(ScriptedPolicy):
    """Speaks in tokens of a model."""

    tokenizer: Any = None

    def tokens_of(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


async def play(make: Any, number: int, episode: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    script = [OVER[entry["over"]]() if isinstance(entry, dict) else entry for entry in episode["script"]]
    policy = TokenPolicy(script)
    policy.tokenizer = tokenizer
    result: dict[str, Any] = {}
    try:
        result["scores"] = await make().run(Task(str(number), "", "", "test", episode["row"]), policy)
    except EpisodeOver as over:
        result["over"] = over.ending
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"

    def text(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    result["strands"] = [text(strand) for strand in policy.strands]
    result["said"] = [text(policy.strands[strand][begin:end]) for strand, begin, end in policy.sampled]
    result["turns"] = [sum(strand == each for each, _, _ in policy.sampled) for strand in range(len(policy.strands))]
    return result


async def main() -> dict[str, Any]:
    asked = json.load(sys.stdin)
    try:
        make = importlib.import_module(f"app.environment.{asked['kind']}").make(asked["settings"])
    except LoadError as error:
        return {"refused": str(error)}

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(asked["model"] + "/tokenizer.json")
    episodes = [play(make, number, episode, tokenizer) for number, episode in enumerate(asked["episodes"])]
    return {"info": make.info, "episodes": await asyncio.gather(*episodes)}


if __name__ == "__main__":
    answer = asyncio.run(main())
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
