import asyncio

from tests.environment.pools import play_one, running_pool

GUESS = """
class Env:
    def begin(self, task):
        self.answer = task.answer
        self.found = False
    def step(self, reply):
        self.found = reply.text == self.answer
        return None if self.found else f"not {reply.text}"
    def score(self):
        return {"found": self.found, "half": 0.5}
"""


def test_an_episode_asks_for_turns_and_ends_with_scores(own):
    async def run():
        async with running_pool(own(GUESS)) as pool:
            return await play_one(pool, "7", "42"), pool.counts

    played, counts = asyncio.run(run())
    assert played.texts == [(0, "6*7="), (0, "|not 7>")]
    assert played.end.scores == {"found": 1.0, "half": 0.5}
    assert list(played.end.scores) == ["found", "half"]
    assert played.end.ending == "stop"
    assert played.end.text == "42"
    assert [(turn["role"], turn["text"], turn["tokens"]) for turn in played.end.turns] == [
        ("user", "6*7=", 4),
        ("assistant", "7", 1),
        ("user", "not 7", 7),
        ("assistant", "42", 2),
    ]
    assert played.end.metrics["observation_tokens"] == 7.0
    assert counts == {"restarts": 0}
