"""Tools and agents of whole runs, which a worker imports from the working directory; the docs show the same."""

from typing import Any

ROOMS = {"lamp": 7, "door": 3, "wall": 5, "tree": 9}


def search(query: str, results: int = 3) -> str:
    """Search the handbook.

    Args:
        query: Words to look for.
        results: Most lines to return.
    """
    return "\n".join([f"{name}: room {room}" for name, room in ROOMS.items() if name == query][:results])


class Notebook:
    """One instance an episode: every public method is a tool."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> str:
        """Write something down."""
        self.notes.append(text)
        return f"{len(self.notes)} notes"


class Agent:
    """An agent that is written with an OpenAI client: it asks, and asks again."""

    async def run(self, task: Any, policy: Any) -> dict[str, float]:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=policy.url, api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": task.question}]
            first = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
            said = first.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]
            last = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
        answer = last.choices[0].message.content or ""
        return {"right": float(answer.strip() == task.answer), "said": float(len(said))}
