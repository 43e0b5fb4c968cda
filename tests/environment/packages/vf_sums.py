"""verifiers 0.4: one prompt, one reply."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            yield SumTask(SumData(name=f"sum-{n}", prompt=f"What is {n}+{n}?", answer=str(2 * n)), self.config.task)


__all__ = ["SumTaskset"]
