"""Routes in conversations and in files."""

from __future__ import annotations

import io
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.infra.store.run_store import parquet_bytes
from ratchet.infra.workers.call_log import CALLS, JOURNAL, TURNS, recorded_of, turns_of
from ratchet.rlhf.agents.sessions import Recorded, _append
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.rollout.engine import Chunk, Request
from ratchet.rlhf.schema import ROUTES, TRAJECTORY

SLOTS = 6


def routes(tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 9, (tokens, SLOTS)).astype(np.int16)


def dialogue() -> Dialogue:
    return Dialogue(Request("p0-s0", (1, 2, 3)), turn_starts=[0])


def turn(into: Dialogue, tokens: int, seed: int) -> None:
    """A turn of the policy, for which the engine reads the whole conversation again."""
    before = len(into.request.prompt_ids) + len(into.ids)
    into.wrote(Chunk((7,) * (tokens - 1), (-0.1,) * (tokens - 1)), 0)
    into.wrote(Chunk((8,), (-0.1,), "stop", routes(before + tokens - 1, seed)), 0)


def cell(into: Dialogue) -> np.ndarray:
    return into.routed_experts.reshape(-1, SLOTS)


def test_a_token_keeps_the_experts_of_the_pass_that_read_it_first() -> None:
    one = dialogue()
    turn(one, 4, seed=0)
    assert np.array_equal(cell(one), routes(6, 0)), "the last token is not read"
    one.heard([5, 5])
    assert np.array_equal(cell(one)[:6], routes(6, 0))
    assert (cell(one)[6:] == -1).all(), "nobody has read what the environment said"
    one.turn_starts.append(len(one.ids))
    turn(one, 2, seed=1)
    assert np.array_equal(cell(one)[:6], routes(6, 0))
    assert np.array_equal(cell(one)[6:], routes(3 + 4 + 2 + 2 - 1, 1)[6:])
    assert dialogue().routed_experts.size == 0, "an engine that tells nothing"


def test_routes_end_where_a_response_is_cut() -> None:
    one = dialogue()
    one.wrote(Chunk((7, 7), (-0.1, -0.1), "stop", routes(9, 0)), 0)
    assert np.array_equal(cell(one), routes(9, 0)[:4])


@pytest.mark.parametrize("schema", [JOURNAL, TURNS], ids=["journal", "turns"])
def test_a_crash_loses_no_routes(schema: pa.Schema) -> None:
    one = dialogue()
    rows = []
    for seed in range(3):
        turn(one, 3, seed)
        one.answered_by(0.0)
        one.heard([5])
        rows.append(one.new_row() if schema == TURNS else one.journaled())
        one.turn_starts.append(len(one.ids))
    table = pa.Table.from_pylist(rows if schema == TURNS else rows[-1:], schema)
    stored = pq.read_table(io.BytesIO(parquet_bytes(table))).to_pylist()
    again = dialogue()
    again.restore(turns_of(stored)["p0-s0"] if schema == TURNS else stored[0])
    assert np.array_equal(again.routed_experts, one.routed_experts)
    assert again.slots == SLOTS
    if schema == TURNS:
        sizes = [len(row["routes"]) for row in rows]
        assert sum(sizes) == len(one.routes), "a row has what is new"
        old = [{name: value for name, value in row.items() if name not in ("routes", "slots")} for row in stored]
        assert turns_of(old)["p0-s0"]["ids"] == one.ids, "rows of an older version"


def test_stored_answers_of_an_agent_bring_their_routes() -> None:
    one, again = dialogue(), dialogue()
    for seed in range(2):
        start, routed = len(one.ids), len(one.routes)
        turn(one, 3, seed)
        answer = Recorded(
            trajectory_id="p0-s0",
            branch="p0-s0",
            call_id="a",
            digest="d",
            heard_ids=[],
            ids=one.ids[start:],
            log_probs=one.log_probs[start:],
            versions=one.versions[start:],
            finish_reason="stop",
            asked="",
            answer="",
            started=0.0,
            seconds=0.0,
            routes=one.routes[routed:],
            slots=one.slots,
        )
        [read] = recorded_of(pa.Table.from_pylist([asdict(answer)], CALLS).to_pylist())["p0-s0"]
        _append(again, read)
    assert np.array_equal(again.routed_experts, one.routed_experts)


@pytest.mark.parametrize(("experts", "limit"), [(8, 0.4), (128, 0.9), (256, 1.01)])
def test_an_expert_takes_as_many_bits_as_their_number_needs(experts: int, limit: float) -> None:
    """Random ones, which zstd cannot compress; in bytes per token, layer and expert."""
    cells = [np.random.default_rng(row).integers(0, experts, 100_000).astype(np.int16) for row in range(4)]
    table = pa.table({ROUTES: pa.array(cells, TRAJECTORY[ROUTES].type)})
    data = parquet_bytes(table)
    file = pq.ParquetFile(io.BytesIO(data))
    column = file.metadata.row_group(0).column(0)
    assert column.total_uncompressed_size < limit * 400_000
    assert column.total_compressed_size < limit * 400_000
    assert file.read().equals(table)
