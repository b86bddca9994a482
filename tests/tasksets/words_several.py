"""An environment of verifiers that answers the policy, and rewards the letters of each answer."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["CountdownEnv", "CountdownTaskset"]


class CountdownTask(vf.Task[vf.TaskData]):
    pass


class CountdownTaskset(vf.Taskset[CountdownTask]):
    INFINITE = True

    def load(self) -> Iterator[CountdownTask]:
        number = 0
        while True:
            yield CountdownTask(vf.TaskData(name=f"game {number}", prompt=f"game {number}"), self.config.task)
            number += 1


class CountdownEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    turns: int = 3


class CountdownEnv(vf.Env[CountdownEnvConfig]):
    async def run(self, task: CountdownTask, agents: vf.Agents) -> None:
        said = 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for left in reversed(range(self.config.turns)):
                said += sum(map(str.isalpha, segment.last_reply))
                if segment.terminated or left == 0:
                    break
                segment = await interaction.turn(f"{left} left")
        interaction.trace.record_reward("letters", float(said), 1.0)
