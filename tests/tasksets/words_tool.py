"""A taskset of verifiers with a tool of each trajectory, which keeps a state."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Doubled(vf.State):
    numbers: list[int] = []


class DoubleConfig(vf.ToolsetConfig):
    pass


class DoubleToolset(vf.Toolset[DoubleConfig, Doubled]):
    TOOL_PREFIX = None

    @vf.tool
    def double(self, number: int) -> int:
        """Double a number."""
        self.state.numbers.append(number)
        return 2 * number


class ToolTask(vf.Task[vf.TaskData, Doubled]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [DoubleToolset(DoubleConfig())]

    @vf.reward
    async def doubled(self, trace: vf.Trace) -> float:
        return float(sum(trace.state.numbers))


class ToolTaskset(vf.Taskset[ToolTask]):
    def load(self) -> Iterable[ToolTask]:
        yield ToolTask(vf.TaskData(prompt="double 21"), self.config.task)


if __name__ == "__main__":
    DoubleToolset.run()
