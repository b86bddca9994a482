"""Environments with effects: wherever a crash comes, no effect is made twice, and no answered turn is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.call_log import JOURNAL, TURNS, TurnLog, turns_of
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.agents.agent_loop import Rules
from ratchet.rlhf.environments.dialogues import Dialogue, joined
from ratchet.rlhf.environments.environment import EnvironmentFailed, Observation, check_environment
from ratchet.rlhf.environments.guarded_calls import EnvironmentCalls
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Chunk
from ratchet.testing import check_environment as check_played
from tests import tiny
from tests.environments import Ledger, check_books, entries
from tests.unit.test_environments import SAMPLING, ScriptedEngine, dialogues_for, generator_of, wait_for

SCRIPT = [["ba", "cde", "xo", "i"], ["u", "xe", "bo", "a"]]
"""The turns of two trajectories."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny.model_folder(tmp_path_factory.mktemp("model")))


class Crash(BaseException):
    """Ends a process: what follows does not happen."""


class Disk:
    """Files of turns that outlive processes; the process ends when it writes file number `crash`."""

    def __init__(self, crash: int | None = None, *, before: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.crash, self.before, self.written = crash, before, 0

    def write(self, table: pa.Table) -> None:
        crashes, self.written = self.written == self.crash, self.written + 1
        if not (crashes and self.before):
            self.rows += pa.Table.from_pylist(table.to_pylist(), TURNS).to_pylist()
        if crashes:
            raise Crash


def play(tokenizer: Any, folder: Path, disk: Disk, script: Sequence[Sequence[str]] = SCRIPT) -> list[Dialogue]:
    """Writes the trajectories, or continues them, one after another."""
    calls = EnvironmentCalls(Ledger, {"folder": str(folder)}, on_error="drop")
    kept = turns_of(disk.rows)
    dialogues = dialogues_for(*("?" for _ in script))
    for dialogue in dialogues:
        if dialogue.request.trajectory_id in kept:
            dialogue.restore(kept[dialogue.request.trajectory_id])
    texts = [turns[len(dialogue.turn_ends) :] for turns, dialogue in zip(script, dialogues, strict=True)]
    generator = generator_of(ScriptedEngine(tokenizer, texts))
    log = TurnLog(disk.write, "run/generate")
    for dialogue in dialogues:
        if not dialogue.finish_reason:
            generator.submit([(dialogue, Rules(SAMPLING, calls, 6, turns=log))])
            wait_for(generator, [dialogue])
    return dialogues


def facts(dialogues: Sequence[Dialogue]) -> list[tuple[Any, ...]]:
    return [(d.ids, d.mask, d.turn_starts, d.turn_ends, d.turn_rewards, d.finish_reason) for d in dialogues]


@pytest.mark.parametrize("before", [True, False], ids=["before it is stored", "after it was stored"])
def test_a_crash_at_any_row_repeats_no_effect_and_asks_no_answered_turn_again(
    tokenizer: Any, tmp_path: Path, before: bool
) -> None:
    whole = Disk()
    undisturbed = play(tokenizer, tmp_path / "whole", whole)
    assert [len(dialogue.turn_rewards) for dialogue in undisturbed] == [4, 4]
    assert whole.written == 16, "each turn before it is answered, and each answer"
    expected = facts(undisturbed)
    for crash in range(whole.written):
        folder, disk = tmp_path / str(crash), Disk(crash, before=before)
        with pytest.raises(Crash):
            play(tokenizer, folder, disk)
        resumed = play(tokenizer, folder, disk)
        check_books(folder)
        calls = [entry["key"] for entry in entries(folder, "calls")]
        dropped = [dialogue for dialogue in resumed if dialogue.error is not None]
        for kept, fact in zip(resumed, expected, strict=True):
            if kept not in dropped:
                assert facts([kept]) == [fact]
        answer_lost, was_asked = before == (crash % 2 == 1), before
        delicate = SCRIPT[crash // 8][crash % 8 // 2].startswith("x")
        if answer_lost and delicate:
            assert [dialogue.finish_reason for dialogue in dropped] == ["error"]
            assert "a crash lost the environment's answer to 'x" in str(dropped[0].error)
            assert len(calls) == len(set(calls)), "it was not asked again"
        else:
            assert not dropped
            # an answer that was lost is asked for again, with its key
            assert len(calls) - len(set(calls)) == (answer_lost and was_asked)
            assert len(entries(folder, "effects")) == 8


def test_rows_that_follow_no_others_are_left_out() -> None:
    [dialogue] = dialogues_for("?")
    rows = []
    for ids in ([1, 2], [3], [4, 5]):
        dialogue.ids = [*dialogue.ids, *ids]
        dialogue.log_probs = dialogue.mask = dialogue.versions = dialogue.ids
        dialogue.turn_ends = [*dialogue.turn_ends, len(dialogue.ids)]
        rows.append(dialogue.new_row())
    assert joined(reversed(rows))["ids"] == [1, 2, 3, 4, 5]
    assert joined([rows[0], rows[2]])["ids"] == [1, 2], "its predecessor is missing"
    assert joined([rows[1]]) == {}
    other = Dialogue(dialogue.request)
    other.restore({**joined(rows[:1])})
    other.ids = [*other.ids, 9]
    other.turn_ends = [2, 3]
    stray = other.new_row()
    assert joined([*rows, stray])["ids"] == [1, 2, 3, 4, 5], "the row of a process that was thought dead"
    dialogue.restart()
    dialogue.ids = [7]
    assert joined([*rows, dialogue.new_row()])["ids"] == [7], "the last attempt counts"


def test_rows_keep_the_images_of_answers() -> None:
    [dialogue] = dialogues_for("?")
    rows, answers = list[dict[str, Any]](), [(b"one", b"two"), (), (b"one",)]
    for images in answers:
        dialogue.turn_starts.append(len(dialogue.ids))
        dialogue.wrote(Chunk((1, 2), (-0.5, -0.5), "stop"), version=0)
        rows.append(dialogue.new_row())
        dialogue.answered_by(0.0)
        dialogue.heard([7, 8], images)
        rows.append(dialogue.new_row())
    assert dialogue.next_request(SAMPLING).images == (b"one", b"two", b"one")
    kept = pa.Table.from_pylist(rows, TURNS).to_pylist()
    for count in range(2, 7):
        restored = Dialogue(dialogue.request)
        restored.restore(turns_of(reversed(kept[:count]))[dialogue.request.trajectory_id])
        seen = [image for images in answers[: count // 2] for image in images]
        assert (restored.images, sum(restored.turn_images)) == (seen, len(seen))
    assert restored.turn_images == [2, 0, 1]
    restored.restart()
    assert (restored.images, restored.turn_images) == ([], [])
    again = Dialogue(dialogue.request)
    again.restore(pa.Table.from_pylist([dialogue.journaled()], JOURNAL).to_pylist()[0])
    assert (again.images, again.turn_images, again.ids) == (dialogue.images, [2, 0, 1], dialogue.ids)


def test_each_attempt_has_its_own_keys(tokenizer: Any, tmp_path: Path) -> None:
    class Shaky(Ledger):
        failed = False

        def step(self, turn: str, key: str) -> Observation:
            if turn == "cde" and not Shaky.failed:
                Shaky.failed = True
                raise RuntimeError("not today")
            return super().step(turn, key)

    calls = EnvironmentCalls(Shaky, {"folder": str(tmp_path), "turns": 2}, on_error="retry")
    [dialogue] = dialogues_for("?")
    generator, disk = generator_of(ScriptedEngine(tokenizer, [["ba", "cde", "ba", "cde"]])), Disk()
    generator.submit([(dialogue, Rules(SAMPLING, calls, 6, turns=TurnLog(disk.write, "run/generate")))])
    wait_for(generator, [dialogue])
    keys = [entry["key"].split("/") for entry in entries(tmp_path, "calls")]
    assert [(key[3], key[4]) for key in keys] == [("0", "0"), ("1", "0"), ("1", "1")]
    assert all(key[:2] == ["run", "generate"] for key in keys)
    restored = Dialogue(dialogue.request)
    restored.restore(turns_of(disk.rows)[dialogue.request.trajectory_id])
    assert facts([restored]) == facts([dialogue])


class Forgetful(Ledger):
    def snapshot(self) -> Any:
        return self.balance


def test_a_snapshot_that_is_no_text_fails_its_trajectory(tokenizer: Any, tmp_path: Path) -> None:
    calls = EnvironmentCalls(Forgetful, {"folder": str(tmp_path)}, on_error="fail")
    [dialogue] = dialogues_for("?")
    generator = generator_of(ScriptedEngine(tokenizer, [["ba"]]))
    generator.submit([(dialogue, Rules(SAMPLING, calls, 6))])
    with pytest.raises(EnvironmentFailed, match="snapshot returned 2, which is not a text"):
        wait_for(generator, [dialogue])


class Half(Ledger):
    snapshot = None  # type: ignore[assignment]


class Keyless(Ledger):
    def step(self, turn: str) -> Observation:  # type: ignore[override]
        return Observation(None)


class Amnesiac(Ledger):
    def restore(self, state: str) -> None: ...


def test_what_a_durable_environment_lacks_is_said(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path)}
    here = "tests.unit.test_durable_environments"
    check_environment("tests.environments:Ledger", options)
    with pytest.raises(UserError, match=r"Half has no method snapshot: it needs reset.*is_repeatable\(turn\)"):
        check_environment(f"{here}:Half", options)
    with pytest.raises(UserError, match=r"Keyless cannot be called as step\(turn, key\): too many"):
        check_environment(f"{here}:Keyless", options)
    played = check_played("tests.environments:Ledger", ["ba", "cde", "xo", "i"], folder=str(tmp_path / "a"))
    assert [observation.content for observation in played] == ["2 ", "5 ", "7 ", None]
    assert [entry["turn"] for entry in entries(tmp_path / "a", "effects")].count("ba") == 3
    with pytest.raises(UserError, match="snapshot"):
        check_played(f"{here}:Forgetful", ["ba"], folder=str(tmp_path / "b"))


def test_the_keys_of_two_evaluations_differ(tmp_path: Path) -> None:
    """Both play the same prompts, and are no run: an effect of the first is none of the second."""
    config = tiny.config(tmp_path)
    scopes = []
    for _ in range(2):
        worker = Worker(config, RunStore(ObjectStore("memory://evaluate")), [])
        logs = worker._turn_log("validate", 0, False), worker._call_log("validate", 0, False)
        scopes += [log.scope for log in logs]
    assert scopes[0] == scopes[1] and scopes[2] == scopes[3] and scopes[0] != scopes[2]
    assert all(scope.endswith("/validate") for scope in scopes)


def test_the_turns_of_many_trajectories_share_files() -> None:
    """One file for each turn of 64 trajectories would be 64 requests to a bucket."""
    tables: list[pa.Table] = []

    async def record() -> None:
        log = TurnLog(tables.append, "run/generate")
        await asyncio.gather(*(log.record(dialogue) for dialogue in dialogues_for(*"?" * 64)))

    asyncio.run(record())
    assert sum(table.num_rows for table in tables) == 64
    assert len(tables) <= 2
