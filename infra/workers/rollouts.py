"""The shards that a worker is generating. The trajectories of all shards share the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.infra.store.records import Weights
from ratchet.infra.workers.calls import C, Context, RowsCall, S, ShardKey, ShardStart

if TYPE_CHECKING:
    from ratchet.rlhf.agents.agent_loop import Generator, Rules, TurnRecorder
    from ratchet.rlhf.agents.sessions import Recorded, Recorder
    from ratchet.rlhf.environments.dialogues import Dialogue
    from ratchet.rlhf.rollout.engine import RolloutEngine

Generated = tuple[ShardKey, str]
"""A shard, and the id of one of its trajectories."""


class JournalRows(Mapping[str, Mapping[str, Any]]):
    """The newest row of each trajectory in the files of a journal. A row is made when it is read: all rows, as
    Python objects, would take every replica seconds and gigabytes."""

    def __init__(self, tables: Sequence[pa.Table]) -> None:
        self._tables = tables
        self._places: dict[str, tuple[int, int]] = {}
        """Number of the table and of the row, by trajectory id."""
        most: dict[str, tuple[int, int, bool]] = {}
        for number, table in enumerate(tables):
            tokens, turns = (pc.list_value_length(table[name]).to_pylist() for name in ("ids", "turn_rewards"))
            names, reasons = table["trajectory_id"].to_pylist(), table["finish_reason"].to_pylist()
            for row, name in enumerate(names):
                progress = tokens[row], turns[row], bool(reasons[row])
                # replicas that share a restored shard each journal all of its trajectories, but have new tokens of only
                # some
                if name not in most or progress > most[name]:
                    most[name], self._places[name] = progress, (number, row)

    def __getitem__(self, trajectory_id: str) -> Mapping[str, Any]:
        number, row = self._places[trajectory_id]
        [made] = self._tables[number].slice(row, 1).to_pylist()
        return made  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True)
class Journaled:
    """The trajectories and answers that an earlier process has generated for incomplete shards."""

    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Rows of journals by trajectory id."""
    recorded: Mapping[str, Sequence[Recorded]] = field(default_factory=dict)
    """Answers to agents, by trajectory id."""
    turns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Rows of the trajectories with durable environments, by trajectory id."""


@dataclass
class OpenShard:
    """A shard with incomplete trajectories."""

    context: Context[Any]
    start: ShardStart
    by_id: dict[str, Dialogue]
    complete: dict[str, Dialogue] = field(default_factory=dict)


class Rollouts:
    """The trajectories of one worker, by shard. A shard may be dropped at any time, by another thread than the one that
    generates; its submitted trajectories are then ignored."""

    def __init__(
        self,
        build: Callable[[RolloutEngine], Generator],
        log: Callable[[str, int, bool], Recorder],
        turn_log: Callable[[str, int, bool], TurnRecorder],
    ) -> None:
        """Takes three factories: of an engine's generator, and of the recorders of agents' answers and of durable
        environments' turns in a stage of an iteration, which may store nothing."""
        self._build, self._log, self._turn_log = build, log, turn_log
        self._generator: Generator | None = None
        self._shards: dict[ShardKey, OpenShard] = {}
        self._owners: dict[int, ShardKey] = {}
        """The shard of each submitted trajectory, by `id`."""
        self._restored: list[Dialogue] = []
        """Trajectories that were already complete when they were submitted."""
        self._changing = threading.RLock()
        """Held while shards and owners change, and never while `wait` waits."""

    @property
    def is_empty(self) -> bool:
        """True if no shard is open."""
        return not self._shards

    def begin(
        self, request: RowsCall[C, S], context: Context[C], journal: Journaled, *, records: bool
    ) -> tuple[tuple[str, ...], ...]:
        """Opens a shard, unless it is open; see `Worker.begin`. Trajectories continue from `journal`."""
        assert request.begin is not None
        if request.key not in self._shards:
            start = request.begin(context)
            by_id = {dialogue.request.trajectory_id: dialogue for dialogue in start.dialogues}
            environments = start.rules.environments
            if start.rules.agents is not None:
                recorder = self._log(request.call.stage, request.call.iteration, records)
                rules = replace(start.rules, recorder=recorder, recorded=journal.recorded)
                start = replace(start, rules=rules)
            elif environments is not None and environments.durable:
                turns = self._turn_log(request.call.stage, request.call.iteration, records)
                start = replace(start, rules=replace(start.rules, turns=turns))
                for name in by_id.keys() & journal.turns.keys():
                    by_id[name].restore(journal.turns[name])
            # other environments cannot be brought back to the state after these turns: their trajectories start over
            elif environments is None or environments.replayable:
                for name in by_id.keys() & journal.rows.keys():
                    by_id[name].restore(journal.rows[name])
            with self._changing:
                self._shards[request.key] = OpenShard(context, start, by_id)
        dialogues = self._shards[request.key].start.dialogues
        by_prompt = groupby(dialogues, key=lambda dialogue: dialogue.request.prompt_ids)
        return tuple(tuple(dialogue.request.trajectory_id for dialogue in group) for _, group in by_prompt)

    def submit(
        self, engine: RolloutEngine, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]]
    ) -> None:
        """Starts or continues trajectories of open shards with the weights that the engine holds; see
        `Worker.generate`."""
        generator = self._generator
        if generator is None:
            generator = self._generator = self._build(engine)
        if generator.engine is not engine or generator.version != weights.version or generator.is_paused:
            generator.resume(weights.version, engine)
        incomplete: list[tuple[Dialogue, Rules]] = []
        with self._changing:
            for key, ids in submitted:
                if (shard := self._shards.get(key)) is None:  # it was dropped since
                    continue
                new = [shard.by_id[name] for name in ids if id(shard.by_id[name]) not in self._owners]
                self._owners |= {id(dialogue): key for dialogue in new}
                self._restored += [dialogue for dialogue in new if dialogue.finish_reason]
                incomplete += [(dialogue, shard.start.rules) for dialogue in new if not dialogue.finish_reason]
            if incomplete:
                generator.submit(incomplete)

    def wait(self, timeout_s: float) -> list[Generated]:
        """Waits until trajectories are complete; see `Generator.wait`."""
        assert self._generator is not None
        generated: list[Generated] = []
        complete, self._restored = self._restored, []
        try:
            complete = complete + self._generator.wait(0.0 if complete else timeout_s)
        except BaseException:
            self._restored = complete  # for the next call: nobody submits them again
            raise
        with self._changing:
            for dialogue in complete:
                if id(dialogue) not in self._owners:  # it was dropped after it was complete
                    continue
                key, name = self._owners[id(dialogue)], dialogue.request.trajectory_id
                self._shards[key].complete[name] = dialogue
                generated.append((key, name))
        return generated

    def journal(self, iteration: int, stage: str) -> list[dict[str, Any]]:
        """Returns one row for each trajectory with tokens in a stage's open shards. Trajectories of agents and of
        durable environments are left out, because their turns are stored one by one."""
        with self._changing:
            shards = [
                shard for (name, number, _), shard in self._shards.items() if (name, number) == (stage, iteration)
            ]
        dialogues = [
            dialogue
            for shard in shards
            if shard.start.rules.agents is None and shard.start.rules.turns is None
            for dialogue in shard.by_id.values()
        ]
        copies = [] if self._generator is None else self._generator.copies(dialogues)
        return [dialogue.journaled() for dialogue in copies if dialogue.ids and dialogue.error is None]

    def take(self, key: ShardKey, names: Sequence[str]) -> list[Dialogue]:
        """Closes a shard that another worker writes; hands it the trajectories that were completed here."""
        complete = self._shards[key].complete
        self.drop([key])
        return [complete[name] for name in names]

    def finish(self, key: ShardKey, others: Sequence[Dialogue]) -> Context[Any]:
        """Closes a shard whose trajectories are complete, here or with other workers (`others`).

        Returns:
            The context of the shard's computation, with the trajectories in order.
        """
        shard = self._shards[key]
        complete = shard.complete | {dialogue.request.trajectory_id: dialogue for dialogue in others}
        shard.context.dialogues = [complete[name] for name in shard.by_id]
        self.drop([key])
        return shard.context

    def drop(self, keys: Sequence[ShardKey]) -> None:
        """Forgets shards, and cancels their incomplete trajectories."""
        with self._changing:
            for key in keys:
                if (shard := self._shards.pop(key, None)) is not None:
                    if self._generator is not None:
                        self._generator.cancel(shard.by_id.values())
                    for dialogue in shard.by_id.values():
                        self._owners.pop(id(dialogue), None)

    def drop_all(self) -> None:
        self.drop(list(self._shards))

    def close(self) -> None:
        """Drops all shards, and the engine; nobody waits for trajectories any more."""
        self.drop_all()
        self._generator = None

    def pause(self) -> None:
        """Ends the engine's requests, so that its weights can change; see `Generator.pause`."""
        if self._generator is not None:
            self._generator.pause()
