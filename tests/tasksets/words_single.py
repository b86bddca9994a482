"""A taskset of verifiers with one answer for each task."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordsConfig(vf.TasksetConfig):
    worth: float = 2.0


class WordsData(vf.TaskData):
    answer: str
    worth: float


class WordsTask(vf.Task[WordsData]):
    @vf.reward
    async def has_answer(self, task: WordsData, trace: vf.Trace) -> float:
        return task.worth * (task.answer in trace.assistant_messages[-1].content)

    @vf.reward(weight=0.5)
    async def letters(self, trace: vf.Trace) -> float:
        return float(sum(map(str.isalpha, trace.assistant_messages[-1].content or "")))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    def load(self) -> Iterable[WordsTask]:
        for text, answer in (("hi", "a"), ("say a", "b")):
            data = WordsData(prompt=text, system_prompt="be kind", answer=answer, worth=self.config.worth)
            yield WordsTask(data, self.config.task)
