"""verifiers 0.4: an environment with two agents, of which one may be no part of the training."""

import verifiers.v1 as vf
from vf_sums import SumTaskset


class JudgedTaskset(SumTaskset):
    pass


class JudgedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    trained: bool = False


class JudgedEnv(vf.Env[JudgedConfig]):
    async def setup(self, agents) -> None:
        agents.judge.trainable = self.config.trained

    async def run(self, task, agents) -> None:
        await agents.solver.run(task)
        await agents.judge.run(task)


__all__ = ["JudgedEnv", "JudgedTaskset"]
