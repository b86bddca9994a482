"""Reads the inputs of a call from the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.infra.progress import note
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.records import ShardRef
from ratchet.infra.store.run_store import RunStore, is_call_file
from ratchet.infra.workers.call_log import recorded_of, turns_of
from ratchet.infra.workers.calls import C, Call, Experience, ExpertExperience, ReplayedAnswer
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.rollouts import Journaled, JournalRows
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.schema import ROUTES


class CallInputs:
    """The inputs of calls: shards of other stages, stored answers to prompts, and journals."""

    def __init__(self, store: RunStore, resources: Resources) -> None:
        self._store, self._resources = store, resources
        self._last_journal: tuple[tuple[ShardRef, ...], Journaled] = ((), Journaled())

    def batch(self, call: Call[C]) -> TrajectoryBatch:
        """Returns the columns that the call's stage declares."""
        stages = [self._stage(shards, columns) for shards, columns in call.inputs if columns]
        # an input without columns selects trajectories
        for chosen in (self._stage(shards, columns) for shards, columns in call.inputs if not columns):
            stages = [stage.only(chosen.array("trajectory_id")) for stage in stages]
        return TrajectoryBatch.join(stages) if stages else TrajectoryBatch(pa.table({}))

    def _stage(self, shards: tuple[ShardRef, ...], columns: tuple[str, ...]) -> TrajectoryBatch:
        names = ("trajectory_id", *columns)
        return TrajectoryBatch(pa.concat_tables([self._store.read_shard(shard, names) for shard in shards]))

    def replayed(self, call: Call[C]) -> dict[int, list[ReplayedAnswer]]:
        """Returns stored answers by the number of their prompt, for the prompts that are drawn with answers."""
        return {number: self._answers(call, experience) for number, experience in call.replayed.items()}

    def _answers(self, call: Call[C], experience: Experience | ExpertExperience) -> list[ReplayedAnswer]:
        if isinstance(experience, ExpertExperience):
            return [self._expert_answer(call, experience, number) for number in experience.answers]
        table = self._store.read_shard(experience.shard)
        rows = table.filter(pc.field("prompt_id") == experience.prompt_id).to_pylist()
        return [
            ReplayedAnswer(
                ids=row["response_ids"],
                log_probs=row["rollout_log_probs"],
                mask=row["response_mask"],
                # null if one version drew all tokens
                versions=row["token_versions"] or [row["policy_version"]] * len(row["response_ids"]),
                finish_reason=row["finish_reason"],
                source=f"{experience.source} {row['trajectory_id']}",
                routes=row.get(ROUTES),
            )
            for row in sorted(rows, key=lambda row: int(row["sample"]))
        ]

    def _expert_answer(self, call: Call[C], experience: ExpertExperience, number: int) -> ReplayedAnswer:
        """Returns an answer of an expert, with log-probs of 0: the expert's own are unknown."""
        answer = self._resources.experts(experience.files).answer(number, self._resources.tokenizer)
        assert call.weights is not None, "the rollout has weights"
        size = len(answer.ids)
        return ReplayedAnswer(
            answer.ids,
            [0.0] * size,
            answer.mask,
            [call.weights.version] * size,
            answer.finish_reason,
            answer.where,
            by_expert=True,
        )

    def journaled(self, call: Call[C]) -> Journaled:
        """Returns what an earlier driver has generated. A damaged journal is left out: it only saves time."""
        parts, journaled = self._last_journal
        if parts != call.journal:
            written: list[pa.Table] = []
            answers: list[Mapping[str, Any]] = []
            turns: list[Mapping[str, Any]] = []
            for part in call.journal:
                try:
                    rows = self._store.read_shard(part)
                except Corrupt as damage:
                    note(f"generation restarts without a journal: {damage}")
                else:
                    if is_call_file(part.key):
                        (turns if "before" in rows.column_names else answers).extend(rows.to_pylist())
                    else:
                        written.append(rows)
            journaled = Journaled(JournalRows(written), recorded_of(answers), turns_of(turns))
            self._last_journal = call.journal, journaled
        return journaled
