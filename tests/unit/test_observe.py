"""Runs that another trainer writes while it trains: rows, steps, attempts, and a store that is away."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet import observe
from ratchet.infra.observe import run as observed_run
from ratchet.infra.observe.rows import aligned, generated
from ratchet.infra.observe.run import ObservedRun
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.runs.verify import verify
from ratchet.infra.store.log import Fenced
from ratchet.infra.store.object_store import LocalBackend, ObjectStore
from ratchet.infra.store.records import sha256_of
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.metrics import STEP
from tests.bare_run import claimed

ROWS = [
    {"prompt": "2+2?", "response": "4", "prompt_ids": [1, 2], "response_ids": [3]},
    {"prompt": "3+3?", "response": "six", "prompt_ids": [1, 4], "response_ids": [5, 6]},
    {"prompt": "2+2?", "response": "5", "prompt_ids": [1, 2], "response_ids": [7, 8]},
]
SCORES = [{"score": 1.0}, {"score": 1.0}, {"score": 0.0}]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/runs"


@pytest.fixture
def start(store: str) -> Iterator[Callable[..., ObservedRun]]:
    """Starts runs, and ends them with the test."""
    started: list[ObservedRun] = []

    def begin(name: str = "mine", **options: Any) -> ObservedRun:
        started.append(observe.start(name, store, **{"trainer": "mine", **options}))
        return started[-1]

    yield begin
    for run in started:
        run.close()


def stored(store: str, name: str = "mine") -> Run:
    """Opens a run; nothing in it is damaged or missing."""
    run = open_run(f"{store}/{name}")
    assert list(verify(run.store)) == []
    return run


def step(run: ObservedRun, number: int, score: float = 1.0) -> None:
    run.step(number).write("generate", ROWS).write("score", [{"score": score}] * 3).close()


def steps_of(run: Run) -> list[int]:
    return [int(number) for number in run.metrics()[STEP]]


def test_a_step(start: Callable[..., ObservedRun], store: str) -> None:
    with start(iterations=1, config={"lr": 1e-6}) as run:
        one = run.step(7).write("generate", ROWS).write("score", SCORES)
        one.write("advantages", [{"advantages": 0.5}, {"advantages": -0.5}, {"advantages": [0.25, 1.0]}])
        one.write("judge", [{"opinion": {"kind": name}, "words": n} for n, name in enumerate("abc")])
        one.metrics({"actor/lr": 1e-6, "critic/score/mean": 0.5}).close()
    run_ = stored(store)
    rows = run_.trajectories()
    assert rows["trajectory_id"].tolist() == [f"it000000-p{group}" for group in ("00000-s00", "00001-s00", "00000-s01")]
    assert rows["response"].tolist() == ["4", "six", "5"] and rows["score"].tolist() == [1.0, 1.0, 0.0]
    # a single number stands for each token of the response
    assert [list(cell) for cell in rows["advantages"]] == [[0.5], [-0.5, -0.5], [0.25, 1.0]]
    assert rows["words"].tolist() == [0, 1, 2] and rows["opinion"][1] == {"kind": "b"}
    [metrics] = run_.metrics().to_dict("records")
    assert (metrics[STEP], metrics["reward/mean"], metrics["actor/lr"]) == (7, pytest.approx(2 / 3), 1e-6)
    assert metrics["critic/score/mean"] == 0.5  # what the trainer says takes precedence
    assert metrics["response_length/max"] == 2 and metrics["critic/advantages/min"] == -0.5


def test_groups_are_those_of_equal_prompts_or_of_prompt_id() -> None:
    def groups(*rows: dict[str, Any]) -> list[str]:
        table = generated([{"response": "", **row} for row in rows], 0, "mine", sha256_of)
        return [id_.removeprefix("it000000-") for id_ in table["trajectory_id"].to_pylist()]

    chat = [{"role": "user", "content": "a"}]
    assert groups({"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}) == ["p00000-s00", "p00001-s00", "p00000-s01"]
    assert groups({"messages": chat}, {"messages": list(chat)}) == ["p00000-s00", "p00000-s01"]
    assert groups({"prompt_ids": [1]}, {"prompt_ids": [2]}) == ["p00000-s00", "p00001-s00"]
    assert groups(*({"prompt": "a", "prompt_id": name} for name in "xyx")) == ["p00000-s00", "p00001-s00", "p00000-s01"]
    branches = [{"prompt": "a", "branch": number} for number in (0, 1, 2, 0)]
    assert groups(*branches) == ["p00000-s00", "p00000-s00-b01", "p00000-s00-b02", "p00000-s01"]
    with pytest.raises(UserError, match="row 0: branch 1 has no trajectory before it"):
        groups(branches[1])


def test_rows_may_be_frames_and_tables_and_name_their_trajectory(start: Callable[..., ObservedRun], store: str) -> None:
    frame = pd.DataFrame({"prompt": ["a", "b"], "response": ["x", None], "response_ids": [[1], [2]]})
    frame["dataset_row"] = [3, None]  # pandas makes floats of this, and NaN
    with start() as run:
        scores = pa.table({"trajectory_id": ["it000000-p00001-s00"], "score": np.array([0.5], np.float32)})
        run.step(0).write("generate", frame).write("score", scores).close()
    rows = stored(store).store
    table = rows.read_shard(rows.shards_of(rows.iteration_state(0), "generate")[0])
    assert table["dataset_row"].to_pylist() == [3, None] and table["response"].to_pylist() == ["x", ""]
    assert stored(store).trajectories()["trajectory_id"].tolist() == ["it000000-p00001-s00"]


@pytest.mark.parametrize(
    ("stage", "rows", "says"),
    [
        ("generate", [{"response": "a", "reponse_ids": [1]}], r"no column reponse_ids \(is it response_ids\?\)"),
        ("generate", [{"response": "a"}, {"prompt": "b"}], "row 1 has no response and no response_ids"),
        ("score", [{"advantages": 1}], "no column advantages"),
        ("score", [{"score": 1}, {}], "row 1 has no score and no reward_error"),
        ("mine", [{"score": 1}], "stage mine: the column score belongs to the stage score"),
        ("update_actor", [{"a": 1}], "cannot be called 'update_actor'"),
        ("close", [{"a": 1}], "cannot be called 'close'"),
        ("two words", [{"a": 1}], "cannot be called 'two words'"),
        ("validate", [{"response": "a"}], r"run.validation\(rows\) writes it"),
    ],
)
def test_names_are_checked_at_once(
    stage: str, rows: list[dict[str, Any]], says: str, start: Callable[..., ObservedRun]
) -> None:
    one = start().step(0)
    if stage != "generate":
        one.write("generate", [{"response": "a"}])
    with pytest.raises(UserError, match=says):
        one.write(stage, rows)


def test_the_order_of_a_step(start: Callable[..., ObservedRun]) -> None:
    run = start()
    with pytest.raises(UserError, match="step 3: write generate before score"):
        run.step(3).write("score", SCORES)
    one = run.step(4).write("generate", ROWS)
    with pytest.raises(UserError, match="step 4 has its generate already"):
        one.write("generate", ROWS)
    with pytest.raises(UserError, match="step 4 comes after step 4: the numbers of steps grow"):
        run.step(4)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"response_ids": ["a"]}, "row 1: response_ids is no list"),
        ({"response": 5}, "row 1: response is no string"),
        ({"policy_version": 0.5}, "row 1: policy_version is no int32"),
        ({"prompt_ids": [2**40]}, "row 1: prompt_ids is no list"),
        ({"rollout_log_probs": [None, "x"]}, "row 1: rollout_log_probs is no list"),
        ({"response_ids": [1, 2.5]}, "row 1: response_ids is no list"),
        ({"response_ids": 3}, "row 1: response_ids is no list"),
        ({"response_ids": ["1"]}, "row 1: response_ids is no list"),
        ({"messages": "hello"}, "row 1: messages is no JSON"),
        ({"prompt": ["a"]}, "row 1: a prompt is a text or a list of messages"),
    ],
)
def test_types_are_checked_with_the_row(row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"stage generate, {says}"):
        generated([{"response": "a"}, {"response": "b", **row}], 0, "mine", sha256_of)


def test_rows_of_other_stages_are_matched() -> None:
    ids = ["a", "b"]
    with pytest.raises(UserError, match="stage score has 1 row, and the step has generated 2 trajectories"):
        aligned("score", [{"score": 1}], ids, [1, 1])
    with pytest.raises(UserError, match="stage score: several rows name the trajectory a"):
        aligned("score", [{"trajectory_id": "a", "score": 1}] * 2, ids, [1, 1])
    with pytest.raises(UserError, match="the step has generated no trajectory c"):
        aligned("score", [{"trajectory_id": "c", "score": 1}], ids, [1, 1])


def test_a_step_that_is_not_stored_is_said_and_the_run_goes_on(
    start: Callable[..., ObservedRun], store: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with start() as run:
        run.step(1).write("generate", [{"response": "a", "response_ids": ["x"]}]).close()
        step(run, 2)
    assert (
        "ratchet: mine: step 1 is not stored: stage generate, row 0: response_ids is no list" in capfd.readouterr().err
    )
    assert steps_of(stored(store)) == [2]


def test_validations_are_of_the_weights_after_the_last_step(start: Callable[..., ObservedRun], store: str) -> None:
    held_out = [{"prompt": "9?", "response": "9", "data_source": "sums"}]
    with start() as run:
        run.validation([{**held_out[0], "score": 0.0}])
        step(run, 1)
        run.validation([{**held_out[0], "score": 1.0}])
        step(run, 2)
        with pytest.raises(UserError, match="no column advantages"):
            run.validation([{**held_out[0], "advantages": 1.0}])
    run_ = stored(store)
    scores = [run_.store.validation_metrics(version).get("val-core/sums/reward/mean@1") for version in (0, 1, 2)]
    assert scores == [0.0, 1.0, None] and steps_of(run_) == [1, 2]


def test_several_validations_before_a_step_do_not_begin_a_fork(start: Callable[..., ObservedRun], store: str) -> None:
    with start() as run:
        for _ in range(2):
            run.validation([{"response": "9", "score": 0.0}])
        step(run, 0)
        for _ in range(2):
            run.validation([{"response": "9", "score": 0.0}])
        step(run, 1)
    assert steps_of(stored(store)) == [-1, 0, 0, 1] and not ObjectStore(f"{store}/mine-2").list("")


def test_a_resumed_trainer_forks_the_run_where_it_repeats_steps(
    start: Callable[..., ObservedRun], store: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with start() as run:
        for number in (10, 20, 30):
            step(run, number, score=0.1)
    with start() as run:  # nothing is repeated
        step(run, 40, score=0.1)
    assert not ObjectStore(f"{store}/mine-2").list("")
    with start() as run:
        step(run, 20, score=0.2)
        assert steps_of(stored(store)) == [10, 20, 30, 40]
    assert "mine repeats step 20, which mine has: mine-2 shares what came before it" in capfd.readouterr().err
    with start() as run:
        step(run, 30, score=0.2)
    with start() as run:
        step(run, 30, score=0.3)
        step(run, 40, score=0.3)
    assert run.url == f"{store}/mine-3"
    means = {
        name: [round(mean, 1) for mean in stored(store, name).metrics()["reward/mean"]] for name in ("mine", "mine-2")
    }
    assert means == {"mine": [0.1] * 4, "mine-2": [0.1, 0.2, 0.2]}
    last = stored(store, "mine-3")
    assert steps_of(last) == [10, 20, 30, 40] and last.config.run.name == "mine-3"
    assert [round(score, 1) for score in last.trajectories()["score"][::3]] == [0.1, 0.2, 0.3, 0.3]
    # what they share is stored once
    assert not [key for key in last.store.objects.list("trajectories/") if "iteration=000000" in key]


def test_a_run_that_is_named_like_an_attempt_is_left_alone(start: Callable[..., ObservedRun], store: str) -> None:
    for name in ("mine-2", "mine"):
        with start(name) as run:
            step(run, 1)
    with start() as run:
        step(run, 1)
    assert run.url == f"{store}/mine-3" and steps_of(stored(store, "mine-2")) == [1]


def test_two_writers_of_a_run(start: Callable[..., ObservedRun], store: str) -> None:
    first = start()
    with pytest.raises(Fenced, match="run mine is being driven"):
        start()
    step(first, 1)
    first.close()
    assert steps_of(stored(store)) == [1]


def test_runs_of_others_are_refused(start: Callable[..., ObservedRun], store: str) -> None:
    claimed(f"{store}/own")
    with pytest.raises(UserError, match=r"own is Ratchet's own run, and mine would write to it"):
        start("own")
    start().close()
    with pytest.raises(UserError, match=r"mine is mine's run, and trl would write to it: choose another name"):
        start(trainer="trl")


def test_the_end_of_the_trainer_is_known(start: Callable[..., ObservedRun], store: str) -> None:
    with pytest.raises(ZeroDivisionError), start("failed") as run:
        run.step(1 // 0)
    beat = json.loads(ObjectStore(f"{store}/failed").get("log/heartbeat.json"))
    assert (
        beat["stopped"]
        and beat["failure"] == "integer division or modulo by zero"
        and beat["standing"]["state"] == "open"
    )
    with start("done") as run:
        step(run, 1)
    assert json.loads(ObjectStore(f"{store}/done").get("log/heartbeat.json"))["standing"]["state"] == "finished"


def test_secrets_are_left_out(start: Callable[..., ObservedRun], store: str) -> None:
    secret = {"wandb": {"api_key": "s3cret"}, "hub": [{"hf_token": "s3cret"}], "lr": math.inf, "object": Path("/a")}
    with start(config=secret) as run:
        step(run, 1)
    objects = ObjectStore(f"{store}/mine")
    assert not [key for key in objects.list("") if b"s3cret" in objects.get(key)]
    observed = stored(store).config.observed
    assert observed is not None and observed.config["lr"] == "inf" and observed.config["object"] == "/a"


class Outage:
    """A store that does not answer while `away` is set; what it was asked to write may have been written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
        self.away = threading.Event()
        self.said = threading.Event()
        """It was said that something waits."""
        tell = observed_run._tell
        monkeypatch.setattr(observed_run, "_tell", lambda text: (tell(text), "wait" in text and self.said.set()))
        for name in ("put", "create"):
            monkeypatch.setattr(LocalBackend, name, self._failing(getattr(LocalBackend, name), when))
        assert ObjectStore.__init__.__kwdefaults__ is not None
        monkeypatch.setitem(ObjectStore.__init__.__kwdefaults__, "deadline_s", 0.01)
        monkeypatch.setattr(observed_run, "PAUSE_S", 0.01)

    def _failing(self, original: Callable[..., None], when: str) -> Callable[..., None]:
        def failing(backend: LocalBackend, key: str, data: bytes) -> None:
            away = self.away.is_set() and "heartbeat" not in key
            if away and when == "before":
                raise ConnectionError("the store is away")
            original(backend, key, data)
            if away:
                raise ConnectionError("the answer is lost")

        return failing


@pytest.mark.parametrize("when", ["before", "after"])
def test_steps_wait_for_a_store_that_is_away(
    when: str,
    start: Callable[..., ObservedRun],
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    outage = Outage(monkeypatch, when)
    run = start()
    step(run, 1)
    run.step(2).write("generate", ROWS).close()
    outage.away.set()
    for number in range(3, 6):
        step(run, number)  # returns
    run.validation([{"response": "9", "score": 1.0}])
    assert outage.said.wait(60)
    outage.away.clear()
    run.close()
    assert steps_of(stored(store)) == [1, 2, 3, 4, 5] and len(stored(store).trajectories(columns=["response"])) == 3 * 5
    assert "waits to store step" in capfd.readouterr().err


def test_a_fork_survives_a_store_that_is_away(
    start: Callable[..., ObservedRun], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as run:
        for number in (1, 2):
            step(run, number)
    outage = Outage(monkeypatch, "after")
    run = start()
    outage.away.set()
    step(run, 2, score=0.5)
    assert outage.said.wait(60)
    outage.away.clear()
    run.close()
    assert run.url == f"{store}/mine-2" and steps_of(stored(store, "mine-2")) == [1, 2]
    assert not ObjectStore(f"{store}/mine-3").list("")


def test_steps_that_wait_are_limited(
    start: Callable[..., ObservedRun], store: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(observed_run, "QUEUE", 2)
    outage = Outage(monkeypatch, "before")
    run = start()
    outage.away.set()
    step(run, 1)
    assert outage.said.wait(60)  # the thread holds step 1
    for number in range(2, 6):
        step(run, number)
    outage.away.clear()
    run.close()
    assert steps_of(stored(store)) == [1, 2, 3]
    said = capfd.readouterr().err
    assert "2 steps wait: further ones are left out" in said and "mine: 2 steps left out" in said


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
FLOAT = st.floats(width=32, allow_nan=False)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
TABLES = st.lists(
    st.fixed_dictionaries(
        {"response": TEXT},
        optional={
            "prompt": TEXT,
            "prompt_id": st.sampled_from("abc"),
            "response_ids": TOKENS,
            "prompt_ids": TOKENS,
            "rollout_log_probs": st.lists(FLOAT, max_size=5),
            "finish_reason": st.sampled_from(["stop", "length"]) | st.none(),
            "ground_truth": TEXT | st.none(),
            "dataset_row": st.integers(0, 2**62) | st.none(),
            "turn_rewards": st.lists(FLOAT, max_size=3) | st.none(),
            "agent_parts": st.dictionaries(TEXT, FLOAT, max_size=3),
            "turns": st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=2),
            "by_expert": st.booleans(),
        },
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(TABLES, st.booleans())
def test_any_rows_are_stored_as_they_are(rows: list[dict[str, Any]], are_arrays: bool) -> None:
    given_rows: Any = rows
    if are_arrays:
        arrays = {"response_ids": np.int64, "rollout_log_probs": np.float32, "turn_rewards": np.float64}
        given_rows = [
            {k: np.array(v, arrays[k]) if k in arrays and v is not None else v for k, v in row.items()} for row in rows
        ]
    table = generated(given_rows, 3, "mine", sha256_of)
    for row, out in zip(rows, table.to_pylist(), strict=True):
        for name, value in row.items():
            if name == "prompt_id":
                continue
            if name == "agent_parts":
                assert {part["name"]: part["value"] for part in out[name]} == value
            elif value is not None:
                assert out[name] == value, name
            else:
                assert out.get(name) is None
    ids = table["trajectory_id"].to_pylist()
    assert len(set(ids)) == len(ids)
    by_group: dict[Any, set[str]] = {}
    for row, out in zip(rows, table.to_pylist(), strict=True):
        by_group.setdefault(row.get("prompt_id", ("", row.get("prompt"), str(row.get("prompt_ids")))), set()).add(
            out["prompt_id"]
        )
    assert all(len(found) == 1 for found in by_group.values())
