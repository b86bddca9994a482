"""Datasets from the trajectories of stored runs: what is chosen, what is left out, and who can train on them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, count
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.infra.runs.parquet_file import write_parquet
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.runs.training_data import Dataset, Reason, dataset
from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.records import ShardCommit, StageCommit
from ratchet.infra.store.run_store import ORIGIN, RunStore
from ratchet.rlhf.config import RewardTraining, SFTConfig
from ratchet.rlhf.data.overlap import near_duplicates
from ratchet.rlhf.data.selection import Kind, Selection
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import TRAJECTORY
from tests import tiny
from tests.stored import STORED
from tests.tiers import sampled

PAIRS = (Kind.dpo, Kind.reward_model)
numbers = count()


def trajectory(
    prompt: str, response: str, score: float, *, rendered: str | None = None, **changes: Any
) -> dict[str, Any]:
    """A trajectory without its ids; `rendered` is the prompt as a chat template renders it."""
    messages = [{"role": "user", "content": prompt}]
    row = {"prompt": rendered or prompt, "messages": json.dumps(messages), "response": response, "score": score}
    return row | {"data_source": "math", "finish_reason": "stop"} | changes


def stored_run(
    *iterations: Sequence[Sequence[Mapping[str, Any]]],
    validation: Sequence[str] = (),
    store: str = "memory://runs",
    **changes: Any,
) -> Run:
    """A run that has closed these iterations, each of groups of trajectories."""
    run_store = RunStore.at(f"{store}/run{next(numbers)}")
    claim = open_run(f"file://{STORED}/run").state.claim
    assert claim is not None
    changes = {"reward__function": "tests.rewards:letters"} | changes
    config = tiny.config(Path("/nowhere"), **changes).model_dump(mode="json")
    run_store.log.claim(claim.model_copy(update={"config": config}))
    for iteration, groups in enumerate(iterations):
        rows = [
            {
                "trajectory_id": f"it{iteration:06d}-p{group:05d}-s{sample:02d}",
                "prompt_id": f"it{iteration:06d}-p{group:05d}",
                **row,
            }
            for group, answers in enumerate(groups)
            for sample, row in enumerate(answers)
        ]
        if validation:
            held_out = [
                trajectory(prompt, "", 0.0) | {"trajectory_id": str(number)} for number, prompt in enumerate(validation)
            ]
            _commit(run_store, iteration, "validate", held_out, ("prompt", "response", "score"))
        _commit(run_store, iteration, "generate", rows, TRAJECTORY.names("generate"))
        _commit(run_store, iteration, "score", rows, TRAJECTORY.names("score"))
        run_store.close({"critic/score/mean": 0.0})
    return open_run(run_store.url)


def _commit(
    store: RunStore, iteration: int, stage: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> None:
    schema = TRAJECTORY.arrow(("trajectory_id", *names))
    table = pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)
    ref = store.write_shard(iteration, stage, 0, 0, table)
    place, parts = {"iteration": iteration, "stage": stage}, Fingerprint(parts={})
    times = {"began": 0.0, "ended": 1.0, "seconds": 1.0}
    manifest = Manifest(
        **place,
        term=1,
        attempt=0,
        fingerprint=parts,
        config={},
        columns=tuple(schema.names),
        shards=(ref,),
        metrics={},
        **times,
    )
    store.commit(
        ShardCommit(**place, shard=0, data=ref, term=1, seconds=0.0),
        StageCommit(**place, manifest=store.write_manifest(manifest), fingerprint=parts.digest),
    )


def made(runs: Run | Sequence[Run], kind: Kind, **options: Any) -> Dataset:
    return dataset([runs] if isinstance(runs, Run) else runs, Selection(kind, **options))


def rows_of(runs: Run | Sequence[Run], kind: Kind, **options: Any) -> list[dict[str, Any]]:
    return made(runs, kind, **options).table.to_pylist()


ANSWERS = ("yes it is", "no it is not", "perhaps", "nobody knows that")


def group(prompt: str, *scores: float, **changes: Any) -> list[dict[str, Any]]:
    """Different answers to a prompt, with these scores."""
    return [trajectory(prompt, ANSWERS[number], score, **changes) for number, score in enumerate(scores)]


# What is chosen.


def test_the_best_answer_of_each_group() -> None:
    run = stored_run([group("who is it?", 0.2, 0.7, 0.7), group("when was it?", 0.1, 0.0)])
    assert [row["completion"] for row in rows_of(run, Kind.sft)] == [ANSWERS[1], ANSWERS[0]]
    [row] = rows_of(run, Kind.sft, min_score=0.7)  # which no float32 is
    assert (row["prompt"], row["completion"], row["score"]) == ("who is it?", ANSWERS[1], pytest.approx(0.7))
    assert made(run, Kind.sft, min_score=0.7).left_out == {Reason.MIN_SCORE: 1}


def test_the_users_own_filter(tmp_path: Path) -> None:
    """It chooses among the trajectories, before the best of a group is known."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def keep(row):\n"
        "    assert row['messages'] == [{'role': 'user', 'content': row['prompt']}], row\n"
        "    assert (row['ground_truth'], row['extra_info']) == ({'sum': 1}, {'level': 2}), row\n"
        "    assert row['reward_parts'] == {'length': 3.0} and row['finish_reason'] == 'stop', row\n"
        "    assert row['trajectory_id'].startswith(row['prompt_id']) and row['iteration'] == 0, row\n"
        "    return row['score'] < 0.65 and 'nobody' not in row['response']\n"
        "def rounds(row): return row['score'] / 0\n"
        "def misspells(row): return row['scores'] > 1\n"
        "def takes_nothing(): return True\n"
        "def counts(row): return 1\n"
    )
    truth = {"ground_truth": '{"sum": 1}', "ground_truth_is_json": True, "extra_info": '{"level": 2}'}
    parts = {"reward_parts": [{"name": "length", "value": 3.0}]}
    run = stored_run([group("who is it?", 0.2, 0.7, 0.3, 0.6, **truth, **parts)])
    kept = made(run, Kind.sft, filter=f"{path}:keep")
    assert kept.table["completion"].to_pylist() == [ANSWERS[2]]
    assert kept.left_out == {Reason.FILTER: 2} and kept.trajectories == 4
    assert made(run, Kind.sft, filter=str(path)).table == kept.table, "keep is the function's usual name"
    [pair] = made(run, Kind.dpo, filter=f"{path}:keep").table.to_pylist()
    assert (pair["chosen"], pair["rejected"]) == (ANSWERS[2], ANSWERS[0])
    origin = json.loads(kept.table.schema.metadata[ORIGIN])
    assert origin["selection"]["filter"] == f"{path}:keep" and len(origin["filter_sha256"]) == 64
    path.write_text(path.read_text() + "\n")
    again = json.loads(made(run, Kind.sft, filter=f"{path}:keep").table.schema.metadata[ORIGIN])
    assert again["filter_sha256"] != origin["filter_sha256"], "other code is another filter"
    for name, says in (
        ("rounds", rf"it000000-p00000-s00\) raised ZeroDivisionError: .* \({path}:7\)"),
        ("misspells", rf"raised KeyError: 'scores' \({path}:8\)"),
        ("takes_nothing", r"raised TypeError: takes_nothing\(\) takes 0 positional arguments"),
        ("counts", "returned 1: return True to keep a trajectory, and False otherwise"),
        ("nothing", "has no nothing"),
    ):
        with pytest.raises(UserError, match=says) as found:
            made(run, Kind.sft, filter=f"{path}:{name}")
        assert "\n" not in str(found.value) and str(found.value).startswith(f"--filter {path}:{name}")


@pytest.mark.parametrize("kind", PAIRS)
def test_the_best_answer_against_the_worst(kind: Kind) -> None:
    run = stored_run(
        [group("who is it?", 0.5, 0.9, 0.8, 0.0), group("when was it?", 0.9, 0.8), group("why?", 1.0, 1.0)]
    )
    first, second = rows_of(run, kind)
    assert (first["chosen"], first["rejected"]) == (ANSWERS[1], ANSWERS[3])
    assert (second["chosen"], second["rejected"]) == (ANSWERS[0], ANSWERS[1])
    assert made(run, kind).left_out == {Reason.SAME_SCORE: 1}
    assert len(rows_of(run, kind, margin=0.1)) == 2, "0.9 - 0.8 is 0.1"
    assert made(run, kind, margin=0.2).left_out == {Reason.SAME_SCORE: 1, Reason.MARGIN: 1}
    assert len(rows_of(run, kind, min_score=0.9)) == 2


def test_labels_compare_with_the_mean_or_a_score() -> None:
    run = stored_run([group("who is it?", 1.0, 0.0, 0.5), group("why?", 1.0, 1.0)])
    assert [(row["completion"], row["label"]) for row in rows_of(run, Kind.kto)] == [
        (ANSWERS[0], True),
        (ANSWERS[1], False),
    ]
    assert made(run, Kind.kto).left_out == {Reason.AT_MEAN: 3}
    assert [row["label"] for row in rows_of(run, Kind.kto, min_score=0.5)] == [True, False, True, True, True]


def test_where_the_run_knows_what_is_solved_nothing_else_is_good() -> None:
    groups = [group("who is it?", 1.0, 0.0, 0.1), group("why?", 0.1, 0.0)]
    run = stored_run(groups, reward__function="countdown")
    assert [row["score"] for row in rows_of(run, Kind.sft)] == [1.0]
    assert [row["label"] for row in rows_of(run, Kind.kto)] == [True, False, False, False, False]
    assert len(rows_of(run, Kind.dpo)) == 2, "a pair only compares"
    assert len(rows_of(run, Kind.sft, min_score=0.1)) == 2


def test_an_answer_that_was_cut_off_is_never_good() -> None:
    best = trajectory("who is it?", "it is so", 1.0, finish_reason="length")
    run = stored_run([[best, *group("who is it?", 0.5, 0.0)], [best]])
    assert [row["completion"] for row in rows_of(run, Kind.sft)] == [ANSWERS[0]]
    assert [row["chosen"] for row in rows_of(run, Kind.dpo)] == [ANSWERS[0]]
    assert made(run, Kind.sft).left_out == {Reason.CUT_OFF: 1}
    labelled = made(run, Kind.kto, min_score=0.5)
    assert labelled.table["completion"].to_pylist() == [ANSWERS[0], ANSWERS[1]]
    assert labelled.left_out == {Reason.CUT_OFF_ANSWER: 2}
    worst = trajectory("who is it?", "it is so", -1.0, finish_reason="length")
    assert [row["rejected"] for row in rows_of(stored_run([[worst, *group("who is it?", 0.5)]]), Kind.dpo)] == [
        "it is so"
    ]


def test_what_failed_or_has_several_turns_is_no_trajectory() -> None:
    prompt, turns = "who is it?", [{"role": "policy", "content": "a"}, {"role": "environment", "content": "b"}]
    rows = [
        trajectory(prompt, "a", 9.0, reward_error="it broke"),
        trajectory(prompt, "b", 9.0, rollout_error="it broke"),
        trajectory(prompt, "c", 9.0, turns=turns),
        trajectory(prompt, "e", 0.5, turns=turns[:1]),
    ]
    assert rows_of(stored_run([rows]), Kind.sft)[0]["completion"] == "e"
    assert made(stored_run([rows]), Kind.sft).left_out == {
        Reason.NOT_SCORED: 2,
        Reason.TURNS: 1,
    }


def test_of_an_agent_the_last_conversation_counts_with_its_own_messages() -> None:
    def call(asked: dict[str, Any], **answer: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": "so", **answer}
        times = {"start": 0, "end": 1, "started": 0.0, "seconds": 1.0}
        return {"asked": json.dumps(asked), "answer": json.dumps(message), **times}

    own = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who?"}]}
    text = "be brief\nwho?"
    branches = [
        trajectory("who is it?", "first", 1.0, calls=[call(own)], rendered=text),
        trajectory(
            "who is it?", "last", 1.0, calls=[call(own)], rendered=text, trajectory_id="it000000-p00000-s00-b01"
        ),
    ]
    tools = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}
    unusable = [
        [call(own), call(own)],
        [call({"prompt": "who?"})],
        [call(own, tool_calls=[tools])],
        [call({"messages": [{"role": "tool", "content": "so", "tool_call_id": "1"}]})],
    ]
    others = [[trajectory("who is it?", "x", 1.0, calls=calls)] for calls in unusable]
    of_agent = made(stored_run([branches, *others]), Kind.sft)
    assert of_agent.table.select(["prompt", "completion"]).to_pylist() == [{"prompt": text, "completion": "last"}]
    assert of_agent.left_out == {Reason.BRANCH: 1, Reason.TURNS: len(unusable)}
    [row] = of_agent.table.to_pylist()
    assert row["trajectory_id"] == "it000000-p00000-s00-b01"


def test_tools_are_kept_with_their_prompt() -> None:
    add, now = (json.dumps([{"type": "function", "function": {"name": name}}]) for name in ("add", "now"))
    by_agent = trajectory("when?", "last", 1.0, rendered="<user>when?")
    asked = {"messages": json.loads(by_agent["messages"]), "tools": json.loads(now)}
    call = {"asked": json.dumps(asked), "answer": json.dumps({"role": "assistant", "content": "last"})}
    by_agent["calls"] = [call | {"start": 0, "end": 1, "started": 0.0, "seconds": 1.0}]
    offered = [group("who is it?", 1.0, 0.0, rendered="<user>who is it?", tools=tools) for tools in (None, add, now)]
    found = made(stored_run([*offered, offered[1], [by_agent]]), Kind.sft, similarity=1.0)
    assert found.table["tools"].to_pylist() == [None, add, now, now]
    assert found.left_out == {Reason.DUPLICATE: 1}
    assert "tools" not in made(stored_run([offered[0]]), Kind.sft).table.column_names


def test_messages_where_the_policy_had_a_chat_template_and_else_texts() -> None:
    run = stored_run([group("who is it?", 1.0, 0.0)])
    templated = stored_run([group("when was it?", 1.0, 0.0, rendered="<user>when was it?<assistant>")])
    [row] = rows_of(run, Kind.dpo)
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("who is it?", ANSWERS[0], ANSWERS[1])
    _, row = rows_of([run, templated], Kind.dpo)
    assert row["prompt"] == [{"role": "user", "content": "when was it?"}]
    assert row["chosen"] == [{"role": "assistant", "content": ANSWERS[0]}]


# What is left out.

QUESTIONS = tuple(
    f"{who} walked {miles} miles on {day} before lunch and then rested at the {place} until the evening came"
    for who, miles, day, place in (
        ("anna", "two", "monday", "old mill"),
        ("boris", "six", "tuesday", "bridge over the wide river"),
        ("clara", "nine", "a cold friday", "inn"),
        ("david", "eleven", "his birthday", "edge of the forest"),
        ("emma", "four", "the last sunday in may", "market"),
        ("felix", "ten", "a whim", "farm of his uncle"),
    )
)


def test_the_same_answer_to_the_same_prompt_is_one_row_in_all_runs() -> None:
    iteration = [group(question, 1.0, 0.0) for question in QUESTIONS]
    run, other = stored_run(iteration, iteration), stored_run(iteration)
    both = made([run, other], Kind.sft)
    assert len(both.table) == len(QUESTIONS)
    assert both.left_out == {Reason.DUPLICATE: 2 * len(QUESTIONS)}
    assert set(both.table["run"].to_pylist()) == {run.store.url.rpartition("/")[2]}


def test_near_duplicates_are_alike_in_the_prompt_and_in_the_answer() -> None:
    long_answer = "first add the two numbers of miles, then subtract what was walked on the way back, so it is 12"
    prompt, other = QUESTIONS[:2]
    rows = [
        trajectory(prompt, long_answer, 1.0),
        trajectory(prompt.upper(), long_answer.replace("first", "First"), 1.0),  # the same words and signs
        trajectory(prompt, long_answer.replace("12", "13"), 1.0),
        trajectory(other, long_answer, 1.0),
        trajectory(prompt, "1 + 2", 1.0),
        trajectory(prompt, "1 * 2", 1.0),
    ]
    filler = [[trajectory(question, "12", 1.0)] for question in QUESTIONS[2:]]
    several = made(stored_run([[row] for row in rows] + filler), Kind.sft)
    assert several.left_out == {Reason.NEAR: 1}
    looser = made(stored_run([[row] for row in rows] + filler), Kind.sft, similarity=0.8)
    assert looser.left_out == {Reason.NEAR: 2}
    assert made(stored_run([[row] for row in rows]), Kind.sft, similarity=1.0).left_out == {}


def test_an_instruction_that_all_prompts_share_makes_no_near_duplicates() -> None:
    instruction = "think step by step and put the number alone on the last line of your answer please " * 9
    rows = [[trajectory(f"{instruction} what is {number} plus {number}?", "it is even", 1.0)] for number in range(40)]
    assert len(rows_of(stored_run(rows), Kind.sft)) == 40


def test_near_duplicates_are_found_at_the_threshold() -> None:
    """One in a thousand may be missed: 99.5 % of 400 leaves room for one."""
    words = [f"word{number}" for number in range(400 * 60)]
    texts = [words[start : start + 60] for start in range(0, len(words), 60)]
    changed = [[*text[:-3], "a", "b", "c"] for text in texts]  # 53 of 59 n-grams in common
    examples = [(" ".join(text), "yes") for text in (*texts, *changed)]
    found = near_duplicates(examples, 53 / 59)
    assert sum(found[:400]) == 0
    assert sum(found[400:]) >= 398
    assert not any(near_duplicates(examples, 54 / 59))


def test_a_prompt_of_the_validation_is_left_out() -> None:
    instruction = " Use each number exactly once, and only + - * / and parentheses, and put it in a box."
    held_out = [
        f"Using the numbers 3, 5 and 7, write what equals 22.{instruction}",
        f"Using the numbers 2, 4 and 9, write what equals 17.{instruction}",
        "what is it?",
    ]
    kept = [
        f"Using the numbers 3, 5 and 8, write what equals 22.{instruction}",
        "now what is it?",
    ]
    held = [
        held_out[0].upper(),
        f"Here is a riddle. {held_out[1]}",
        "What is it",
    ]
    rows = [[trajectory(prompt, "none", 1.0)] for prompt in (*kept, *held)]
    rows.append([trajectory("tell me a riddle", held_out[0], 1.0)])
    run = stored_run(rows, validation=held_out)
    decontaminated = made(run, Kind.sft)
    assert decontaminated.table["prompt"].to_pylist() == kept
    assert decontaminated.left_out == {Reason.VALIDATION: 4}
    assert decontaminated.notes == ()
    assert len(made(run, Kind.sft, decontaminate=False).table) == 6
    unvalidated = stored_run(rows)
    assert made(unvalidated, Kind.sft).notes == (
        f"{unvalidated.store.url.rpartition('/')[2]}: no validation, so no prompts to leave out",
    )
    assert len(made([run, unvalidated], Kind.sft).table) == 2, "the validation of one run is left out of all"


def test_one_held_out_prompt_does_not_leave_out_its_instruction() -> None:
    instruction = "Think step by step. Put the number alone on the last line of your answer, and nothing after it."
    rows = [[trajectory(f"{instruction} What is {number} plus 5?", "so", 1.0)] for number in range(20)]
    run = stored_run(rows, validation=[f"{instruction} What is 7 plus 5?"])
    assert made(run, Kind.sft).left_out == {Reason.VALIDATION: 1}


def test_sources_are_balanced() -> None:
    sizes = {"math": 9, "code": 3, "chat": 5}
    rows = [
        [trajectory(f"{source} {number}", f"answer {number}", 1.0, data_source=source)]
        for source, size in sizes.items()
        for number in range(size)
    ]
    balanced = made(stored_run(rows), Kind.sft, balance=True)
    assert balanced.sources == dict.fromkeys(sorted(sizes), 3)
    assert balanced.left_out == {Reason.BALANCE: 8}
    order = [row["trajectory_id"] for row in balanced.table.to_pylist()]
    assert order == sorted(order)


# Mistakes.


def test_mistakes_are_said() -> None:
    run = stored_run([group("who is it?", 1.0, 1.0)])
    with pytest.raises(UserError, match=r"nothing is left of 2 trajectories \(1 groups: one answer, or no difference"):
        made(run, Kind.dpo)
    with pytest.raises(UserError, match="is named twice"):
        made([run, run], Kind.sft)
    with pytest.raises(UserError, match="no iteration is closed yet"):
        made(stored_run(), Kind.sft)
    with pytest.raises(UserError, match="--margin is the difference of a pair, and --kind sft makes none"):
        Selection(Kind.sft, margin=0.5)
    for wrong in ({"margin": 0.0}, {"similarity": 0.0}, {"similarity": 1.5}, {"margin": float("nan")}):
        with pytest.raises(UserError, match="write a"):
            Selection(Kind.dpo, **wrong)


# Whatever the trajectories.

WORDS = st.sampled_from(("add", "two", "numbers", "then", "halve"))
TEXTS = st.lists(WORDS, min_size=1, max_size=30).map(" ".join)
PROMPTS = st.one_of(TEXTS, st.sampled_from(QUESTIONS[:4]))
RESPONSES = st.one_of(TEXTS, st.sampled_from((*ANSWERS[:2], *map(str.upper, ANSWERS[:2]))))  # alike, and not the same
SCORES = st.sampled_from((0.0, 0.1, 0.2, 0.3, 0.7, 1.0))


@st.composite
def groups(draw: st.DrawFn) -> list[dict[str, Any]]:
    prompt, source = draw(PROMPTS), draw(st.sampled_from(("math", "code")))
    rendered = draw(st.sampled_from((prompt, f"<user>{prompt}<assistant>")))
    return [
        trajectory(
            prompt,
            draw(RESPONSES),
            draw(SCORES),
            rendered=rendered,
            data_source=source,
            finish_reason=draw(st.sampled_from(("stop", "stop", "stop", "length"))),
            reward_error=draw(st.sampled_from((None, None, None, "it broke"))),
        )
        for _ in range(draw(st.integers(2, 4)))
    ]


RUNS = st.lists(st.lists(groups(), min_size=1, max_size=5), min_size=1, max_size=3)
SELECTIONS = st.one_of(
    st.builds(
        Selection,
        st.sampled_from((Kind.sft, Kind.kto)),
        st.one_of(st.none(), SCORES),
        similarity=st.sampled_from((0.6, 0.9, 1.0)),
        balance=st.booleans(),
    ),
    st.builds(
        Selection,
        st.sampled_from(PAIRS),
        st.one_of(st.none(), SCORES),
        st.sampled_from((None, 0.1, 0.5)),
        st.sampled_from((0.6, 0.9)),
    ),
)


def grams(text: str, n: int, unit: str) -> set[tuple[str, ...]]:
    words = re.findall(unit, text.lower())
    return {tuple(words[start : start + n]) for start in range(max(len(words) - n, 0) + 1)}


def alike(one: str, other: str) -> float:
    first, second = grams(one, 5, r"\w+|[^\w\s]"), grams(other, 5, r"\w+|[^\w\s]")
    return len(first & second) / len(first | second)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(RUNS, SELECTIONS, st.lists(PROMPTS, max_size=2))
def test_every_row_keeps_what_is_promised(
    iterations: list[list[list[dict[str, Any]]]], selection: Selection, validation: list[str]
) -> None:
    runs = [stored_run(*iterations, validation=validation), stored_run(*reversed(iterations))]
    try:
        first = dataset(runs, selection)
    except UserError as error:
        if "nothing is left" not in str(error):
            raise
        return
    again = dataset([open_run(run.store.url) for run in runs], selection)
    assert again.table.equals(first.table, check_metadata=True)
    by_name = {run.store.url.rpartition("/")[2]: run.trajectories() for run in runs}
    origin = json.loads(first.table.schema.metadata[ORIGIN])
    assert {name: open_run(of_run["url"]).state.slot for name, of_run in origin["runs"].items()} == {
        name: of_run["log"] for name, of_run in origin["runs"].items()
    }
    examples = []
    for row in first.table.to_pylist():
        frame = by_name[row["run"]]
        sides = {"chosen": "_chosen", "rejected": "_rejected"} if selection.kind.is_of_pairs else {"completion": ""}
        found = {}
        for column, suffix in sides.items():
            [origin_row] = frame[frame["trajectory_id"] == row[f"trajectory_id{suffix}"]].to_dict("records")
            found[column] = origin_row
            assert origin_row["iteration"] == row["iteration"]
            assert origin_row["data_source"] == row["data_source"]
            assert origin_row["score"] == row[f"score{suffix}"]
            if isinstance(row["prompt"], str):
                assert (row["prompt"], row[column]) == (origin_row["prompt"], origin_row["response"])
            else:
                assert row["prompt"] == json.loads(origin_row["messages"])
                assert row[column] == [{"role": "assistant", "content": origin_row["response"]}]
        check_choice(found, row.get("label"), selection, frame)
        one = next(iter(found.values()))
        texts = [one["prompt"], *(origin_row["response"] for origin_row in found.values())]
        check_held_out(texts, validation, frame)
        examples.append((row["prompt"], *texts))
    assert len({str((prompt, *texts[1:])) for prompt, *texts in examples}) == len(examples)
    if selection.similarity < 1:  # far above the threshold, none is missed
        for one, other in combinations(examples, 2):
            if one[0] != other[0]:
                continue  # the n-grams that count in a prompt depend on all prompts
            likeness = min(map(alike, one[2:], other[2:]))
            assert likeness < selection.similarity + 0.08
    if selection.balance:
        assert len(set(first.sources.values())) == 1


def check_choice(found: dict[str, Any], label: bool | None, selection: Selection, frame: pd.DataFrame) -> None:
    """The answers of a row are those that the selection asks for."""
    for row in found.values():
        assert not isinstance(row["reward_error"], str)
    good = found.get("chosen", found.get("completion"))
    mates = frame[(frame["prompt_id"] == good["prompt_id"]) & frame["reward_error"].isna()]
    if label is not False:
        assert good["finish_reason"] != "length"
        assert selection.min_score is None or good["score"] >= selection.min_score - 1e-6  # float32
    if label is None:
        assert good["score"] == mates[mates["finish_reason"] != "length"]["score"].max()
    elif selection.min_score is None:
        assert label == (good["score"] > mates["score"].mean())
    if "rejected" in found:
        difference = good["score"] - found["rejected"]["score"]
        assert difference >= (selection.margin or 0.0) - 1e-6  # float32
        assert difference > 0
        assert found["rejected"]["score"] == mates["score"].min()


def check_held_out(texts: list[str], validation: list[str], frame: pd.DataFrame) -> None:
    """No text holds half of the n-grams that only one validation prompt has. Fewer than ten prompts have none in
    common."""
    by_words = {" ".join(re.findall(r"\w+", prompt.lower())): prompt for prompt in validation}
    held = Counter(gram for prompt in by_words for gram in grams(prompt, 13, r"\w+"))
    for prompt in by_words:
        own = {gram for gram in grams(prompt, 13, r"\w+") if held[gram] == 1}
        shared = own & set().union(*(grams(text, 13, r"\w+") for text in texts))
        assert not shared or len(shared) < len(own) / 2 or frame["prompt"].nunique() > 10


# Who can train on them.


@pytest.fixture(scope="module", params=["texts", "messages"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, and a dataset of each kind."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    tiny.model_folder(folder / "model")
    rendered: Any = str
    if request.param == "messages":
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.chat_template = tiny.CHAT_TEMPLATE
        tokenizer.save_pretrained(folder / "model")

        def rendered(question: str) -> str:
            messages = [{"role": "user", "content": question}]
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    iteration = [group(question, 1.0, 0.0, 0.5, rendered=rendered(question)) for question in QUESTIONS]
    run = stored_run(iteration)
    for kind in Kind:
        write_parquet(made(run, kind).table, str(folder / f"{kind}.parquet"))
    return {"model": str(folder / "model"), "folder": str(folder)} | {
        kind.value: str(folder / f"{kind}.parquet") for kind in Kind
    }


@sampled(4)
@pytest.mark.parametrize("kind", [kind.value for kind in Kind])
def test_trainers_of_trl_take_a_step(files: dict[str, str], kind: str, tmp_path: Path) -> None:
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    trainers: dict[str, tuple[Any, Any]] = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward-model": (trl.RewardTrainer, trl.RewardConfig),
    }
    trainer_class, config_class = trainers[kind]
    rows = load_dataset("parquet", data_files=files[kind], split="train", cache_dir=str(tmp_path / "cache"))
    config = config_class(
        str(tmp_path / "output"),
        max_steps=1,
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    tokenizer = AutoTokenizer.from_pretrained(files["model"])
    model = files["model"]
    if kind == "reward-model":
        model = AutoModelForSequenceClassification.from_pretrained(files["model"], num_labels=1)
    trainer = trainer_class(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    loss = trainer.train().training_loss
    assert trainer.state.global_step == 1
    assert loss == loss
    assert any(not weight.equal(before[name]) for name, weight in trainer.model.named_parameters())


@pytest.mark.slow
def test_both_fits_take_a_step(files: dict[str, str], tmp_path: Path) -> None:
    from ratchet.flows.sft import sft
    from ratchet.flows.train_reward_model import train_reward_model

    common = {"model": {"path": files["model"], "dtype": "float32"}, "lr": 1e-3}
    run = {"store": f"file://{tmp_path}/runs"}
    for output in ("sft", "rm"):
        (tmp_path / output).mkdir()
    supervised = SFTConfig.model_validate(
        common
        | {
            "run": run | {"name": "sft"},
            "data": files["sft"],
            "output": str(tmp_path / "sft"),
            "steps": 1,
            "batch_examples": 4,
        }
    )
    assert sft.fn(supervised)["sft/loss"] > 0
    rewarding = RewardTraining.model_validate(
        common
        | {"run": run | {"name": "rm"}, "data": files["reward-model"], "output": str(tmp_path / "rm"), "batch_pairs": 8}
    )
    assert train_reward_model.fn(rewarding)["reward/loss"] > 0


def test_trainers_see_the_prompt_as_the_policy_did(files: dict[str, str]) -> None:
    """No template is applied a second time, and none is left out."""
    from trl.data_utils import maybe_apply_chat_template

    from ratchet.rlhf.config import ModelConfig
    from ratchet.rlhf.data.examples import supervised
    from ratchet.rlhf.models.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(path=files["model"]))
    [name] = set(pq.read_table(files["sft"])["run"].to_pylist())
    run = open_run(f"memory://runs/{name}")
    rendered = run.trajectories(columns=["trajectory_id", "prompt"]).set_index("trajectory_id")["prompt"]
    table = pq.read_table(files["sft"]).to_pylist()
    batch, *_ = supervised(files["sft"], tokenizer, prompt="prompt", response="response", max_tokens=1000)
    for row, ids in zip(table, batch.list("prompt_ids"), strict=True):
        seen = rendered[row["trajectory_id"]]
        assert tokenizer.decode(ids) == seen
        assert (
            maybe_apply_chat_template({"prompt": row["prompt"], "completion": row["completion"]}, tokenizer)["prompt"]
            == seen
        )


def test_a_dataset_is_written_whole_with_its_origin(tmp_path: Path) -> None:
    run = stored_run([group("who is it?", 1.0, 0.0)])
    paths = [tmp_path / name for name in ("one.parquet", "two.parquet")]
    for path in paths:
        write_parquet(made(open_run(run.store.url), Kind.dpo).table, str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    origin = json.loads(pq.read_schema(paths[0]).metadata[ORIGIN])
    assert origin["selection"]["kind"] == "dpo"
    assert sorted(tmp_path.iterdir()) == paths, "nothing else is left there"
    write_parquet(made(run, Kind.dpo).table, "memory://datasets/pairs.parquet")
    assert fsspec.filesystem("memory").cat("/datasets/pairs.parquet") == paths[0].read_bytes()


def test_a_dataset_of_what_is_closed() -> None:
    pairs = made(open_run(f"file://{STORED}/run"), Kind.kto, min_score=10.0)
    assert set(pairs.table["label"].to_pylist()) == {False}
    assert set(pairs.table["iteration"].to_pylist()) == {0}, "one iteration is open"
