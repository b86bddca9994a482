"""An environment of verifiers with two agents."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["PairEnv", "PairTaskset"]


class PairTaskset(vf.Taskset[vf.Task]):
    def load(self) -> Iterable[vf.Task]:
        yield vf.Task(vf.TaskData(prompt="hi"))


class PairEnvConfig(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.solver.run(task)
