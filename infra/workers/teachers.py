"""The teachers of a run: models of this process, and servers, each asked about the prompts of its data sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from ratchet.rlhf.batch import TrajectoryBatch, ragged
from ratchet.rlhf.config import TeacherConfig
from ratchet.rlhf.distributed import ranks
from ratchet.rlhf.errors import RatchetError, UserError
from ratchet.rlhf.train.engine import InferenceEngine, InferencePlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ratchet.rlhf.data.equal_text import Translated
    from ratchet.rlhf.rollout.scoring_servers import ScoringServers
    from ratchet.rlhf.train.model_engine import ModelEngine


class Teachers(InferenceEngine):
    """All teachers of a run, as one engine.

    Teachers of this process are in memory side by side. With `in_turn`, all but one are in host memory.
    """

    def __init__(self, config: TeacherConfig, engines: Mapping[str, Teacher], *, in_turn: bool) -> None:
        """Takes the teachers by key of `TeacherConfig.by_source`, and whether they take turns on the device."""
        self._config, self._engines, self._in_turn = config, engines, in_turn
        self._has_spans = any(teacher.align == "text" for teacher in config.by_source.values())

    def infer_each(self, batches: Sequence[TrajectoryBatch], plan: InferencePlan) -> list[dict[str, pa.Array]]:
        """Computes the outputs of batches that have the column `data_source`; see `InferenceEngine`."""
        rows = [self._rows_of(batch) for batch in batches]
        found: list[list[tuple[np.ndarray, dict[str, pa.Array]]]] = [[] for _ in batches]
        for name, engine in self._asked(rows):
            numbers = [number for number, by_teacher in enumerate(rows) if name in by_teacher]
            parts = [_part(batches[number], rows[number][name]) for number in numbers]
            for number, part, outputs in zip(numbers, parts, engine.infer_each(parts, plan), strict=True):
                if self._has_spans and "spans" not in outputs:
                    outputs["spans"] = _alone(part.lengths("response_ids"))
                found[number].append((rows[number][name], outputs))
        return [_joined(parts) for parts in found]

    def _rows_of(self, batch: TrajectoryBatch) -> dict[str, np.ndarray]:
        """Returns the rows of a batch by teacher."""
        if not len(batch):  # of a shard that selection has emptied: any teacher has the columns
            return {next(iter(self._engines)): np.zeros(0, dtype=np.int64)}
        sources = batch.list("data_source")
        patterns = {source: self._config.pattern_of(source) for source in set(sources)}
        if missing := sorted(source for source, pattern in patterns.items() if pattern is None):
            raise UserError(f"data_source {missing[0]} has no teacher: add {missing[0]} or * to teacher.models")
        chosen = np.array([patterns[source] for source in sources])
        return {str(name): np.flatnonzero(chosen == name) for name in dict.fromkeys(chosen.tolist())}

    def _asked(self, rows: Sequence[Mapping[str, np.ndarray]]) -> Iterator[tuple[str, Teacher]]:
        """Yields the teachers that are needed, in the same order on all ranks, each ready to compute."""
        for name, engine in self._engines.items():
            if not any(name in by_teacher for by_teacher in rows):
                continue
            if self._in_turn:
                for other in self._engines.values():
                    other.place(model=other is engine, optimizer=False)
            yield name, engine

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Moves all teachers to the device, unless they take turns there, or to host memory."""
        for engine in self._engines.values():
            if not (model and self._in_turn):
                engine.place(model=model, optimizer=optimizer)

    def close(self) -> None:
        """Closes the connections to servers, which keep running."""
        for engine in self._engines.values():
            if isinstance(engine, ServedTeacher | TextTeacher):
                engine.close()


class ServedTeacher(InferenceEngine):
    """A teacher that servers compute. Rank 0 asks them, for all ranks."""

    def __init__(self, servers: ScoringServers, vocabulary: int) -> None:
        """Takes the servers, and the number of tokens of their model."""
        self._servers, self._vocabulary = servers, vocabulary

    def infer_each(self, batches: Sequence[TrajectoryBatch], plan: InferencePlan) -> list[dict[str, pa.Array]]:
        own: list[dict[str, pa.Array]] = []
        problem: RatchetError | None = None
        if ranks.rank() == 0:
            try:
                own = [self._outputs(batch, plan) for batch in batches]
            except RatchetError as error:
                problem = error
        answers, problem = ranks.gathered((own, problem))[0]
        if problem is not None:  # on every rank, so that none waits for the others
            raise problem
        computed: list[dict[str, pa.Array]] = answers
        return computed

    def _outputs(self, batch: TrajectoryBatch, plan: InferencePlan) -> dict[str, pa.Array]:
        from ratchet.rlhf.rollout.scoring_servers import tail_of

        assert plan.temperature == 1, "the config refuses another temperature"
        prompts, responses = batch.list("prompt_ids"), batch.list("response_ids")
        texts = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        found = self._servers.top_tokens(texts, [len(prompt) for prompt in prompts], plan.top_k)
        columns: dict[str, list[np.ndarray]] = {"log_probs": [one.log_probs for one in found]}
        if plan.top_k:
            tails = [tail_of(one, text, self._vocabulary) for one, text in zip(found, responses, strict=True)]
            columns |= {
                "topk_ids": [one.ids.ravel() for one in found],
                "topk_log_probs": [one.top_log_probs.ravel() for one in found],
                "tail_log_probs": tails,
            }
        # float32 holds token ids exactly, as the engines' outputs do
        return {
            name: ragged(
                np.concatenate([*columns[name], np.zeros(0)]).astype(np.float32),
                np.array([len(values) for values in columns[name]], dtype=np.int64),
            )
            for name in plan.outputs
        }

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Does nothing: servers have their own devices."""

    def close(self) -> None:
        """Closes the connections; the servers keep running."""
        self._servers.close()


class TextTeacher(InferenceEngine):
    """A teacher with a tokenizer of its own, which reads the same texts. Its log-probs are those of spans of text."""

    def __init__(
        self,
        engine: ModelEngine | ServedTeacher,
        own: PreTrainedTokenizerBase,
        student: PreTrainedTokenizerBase,
        longest: int | None,
    ) -> None:
        """Takes the teacher, both tokenizers, and the largest number of tokens that the teacher reads."""
        self._engine, self._own, self._student, self._longest = engine, own, student, longest

    def infer_each(self, batches: Sequence[TrajectoryBatch], plan: InferencePlan) -> list[dict[str, pa.Array]]:
        assert plan.outputs == ("log_probs",), "the config refuses other outputs"
        read = [self._read(batch) for batch in batches]
        computed = self._engine.infer_each([batch for batch, _ in read], plan)
        return [
            _of_spans(outputs["log_probs"].to_numpy(zero_copy_only=False), texts)
            for outputs, (_, texts) in zip(computed, read, strict=True)
        ]

    def _read(self, batch: TrajectoryBatch) -> tuple[TrajectoryBatch, list[Translated]]:
        """Returns trajectories in the teacher's tokens, and how their responses correspond to the student's."""
        from ratchet.rlhf.data.equal_text import translated
        from ratchet.rlhf.data.prompts import stored_chat, tokenize_chat
        from ratchet.rlhf.data.responses import around_turns

        names = batch.list("trajectory_id")
        chats = map(stored_chat, batch.list("messages"), batch.list("tools"))
        prompts = [tokenize_chat(chat, self._own, name)[1] for chat, name in zip(chats, names, strict=True)]
        ends = around_turns(self._student)
        texts = [
            translated(ids, self._student, self._own, ends=reason == "stop" and ids[-1] in ends)
            for ids, reason in zip(batch.list("response_ids"), batch.list("finish_reason"), strict=True)
        ]
        for name, prompt, text in zip(names, prompts, texts, strict=True):
            if self._longest is not None and len(prompt) + len(text.ids) > self._longest:
                raise UserError(
                    f"{name} has {len(prompt) + len(text.ids)} tokens for its teacher, which reads at most "
                    f"{self._longest}: lower data.max_prompt_tokens or rollout.max_response_tokens"
                )
        columns = {"prompt_ids": prompts, "response_ids": [text.ids for text in texts]}
        return TrajectoryBatch.of(columns), texts

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Moves the teacher as its engine does."""
        self._engine.place(model=model, optimizer=optimizer)

    def close(self) -> None:
        """Closes the connections to servers, if there are any; they keep running."""
        if isinstance(self._engine, ServedTeacher):
            self._engine.close()


Teacher: TypeAlias = "ModelEngine | ServedTeacher | TextTeacher"


def _of_spans(log_probs: Sequence[np.ndarray], texts: Sequence[Translated]) -> dict[str, pa.Array]:
    """Puts the log-prob of each span at the last of the student's tokens in it."""
    values, spans, lengths = [np.zeros(0)], [np.zeros(0, np.int64)], [len(text.own_spans) for text in texts]
    for row, text in zip(log_probs, texts, strict=True):
        sums = np.bincount(text.spans, weights=row)
        is_last = np.append(np.diff(text.own_spans) > 0, True)
        values.append(np.where(is_last, sums[text.own_spans], 0.0))
        spans.append(text.own_spans)
    of_rows = np.array(lengths, dtype=np.int64)
    return {
        "log_probs": ragged(np.concatenate(values).astype(np.float32), of_rows),
        "spans": ragged(np.concatenate(spans).astype(np.int32), of_rows),
    }


def _alone(lengths: np.ndarray) -> pa.Array:
    """Returns spans of one token each."""
    return ragged(np.concatenate([np.zeros(0), *map(np.arange, lengths)]).astype(np.int32), lengths)


def _part(batch: TrajectoryBatch, rows: np.ndarray) -> TrajectoryBatch:
    return batch if len(rows) == len(batch) else batch.take(rows)


def _joined(parts: Sequence[tuple[np.ndarray, dict[str, pa.Array]]]) -> dict[str, pa.Array]:
    """Joins outputs of the rows of a batch, each with the numbers of its rows, in the order of the batch."""
    if len(parts) == 1:
        return parts[0][1]
    order = pa.array(np.argsort(np.concatenate([rows for rows, _ in parts])))
    names = parts[0][1]
    return {name: pa.concat_arrays([outputs[name] for _, outputs in parts]).take(order) for name in names}
