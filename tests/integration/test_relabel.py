"""`ratchet relabel`: labels for what the reward model is least sure of, a better reward model, and a fork with it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ratchet.flows.relabel import Pairs, Relabel, Split, split
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.data.labels import Labels
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.judge_server import judge_server
from tests.processes import Child, Fault, Processes
from tests.rewards import letters

TOOLS = json.dumps([{"type": "function", "function": {"name": "now"}}])


@pytest.fixture
def parent(processes: Processes) -> Run:
    """A run of a policy that writes eight characters, and of a reward model that knows nothing."""
    root = processes.folder
    model = tiny.model_folder(root / "model", letters="abcd0123")
    tiny.prompt_file(root / "prompts.parquet")
    scorer = tiny.reward_model_folder(root / "scorer", model)
    config = tiny.config(
        root,
        run__name="base",
        run__store=f"file://{processes.folder}/runs",
        algorithm__advantage={"type": "grpo"},
        algorithm__kl={},
        reward={"model": {"path": str(scorer), "dtype": "float32"}},
        rollout__n=6,
        data__prompts_per_iteration=16,
        rollout__temperature=1.0,
        train__iterations=3,
    )
    child = processes.train(config)
    assert child.wait() == 0, child.text
    return open_run(f"file://{processes.folder}/runs/base")


def relabelled(processes: Processes, *more: object, name: str = "round", faults: tuple[Fault, ...] = ()) -> Child:
    return processes.cli(
        *("relabel", "base", "--run", name, "--store", f"file://{processes.folder}/runs", "--pairs", 40),
        *("--output", processes.folder / f"{name}-model", "--iterations", 4, "--held-out", 0.4),
        *("lr=0.02", "epochs=8", "batch_pairs=8", "checkpoint_steps=4", *more),
        faults=faults,
    )


def labelled(processes: Processes, name: str = "round", *, better: bool = True) -> Path:
    """What a labeller says who counts the letters a to m."""
    pairs = pd.read_parquet(processes.folder / "runs" / name / "pairs.parquet")
    path = processes.folder / f"{name}.jsonl"
    with path.open("w") as file:
        for pair in pairs.to_dict("records"):
            difference = letters("", pair["answer_a"], "") - letters("", pair["answer_b"], "")
            preferred = "tie" if difference == 0 else "a" if (difference > 0) == better else "b"
            file.write(json.dumps({"pair_id": pair["pair_id"], "preferred": preferred}) + "\n")
    return path


def verdict(processes: Processes, name: str = "round") -> dict[str, Any]:
    return dict(json.loads((processes.folder / "runs" / name / "verdict.json").read_text()))


def test_a_round_of_labels_ends_with_a_fork(parent: Run, processes: Processes) -> None:
    child = relabelled(processes)
    assert child.wait() == 0, child.text
    assert "40 pairs to label in" in child.text and "repeat the command with --labels FILE" in child.text
    pairs = pd.read_parquet(processes.folder / "runs" / "round" / "pairs.parquet")
    check_pairs(pairs, parent)
    again = relabelled(processes)
    assert again.wait() == 0 and "40 pairs to label" in again.text, "it still waits"
    path = labelled(processes)

    killed = relabelled(processes, "--labels", path, faults=(Fault("create", '{"kind":"close","iteration":1'),))
    assert killed.wait() == -signal.SIGKILL, killed.text
    fit = open_run(f"file://{processes.folder}/runs/round-fit")
    assert fit.state.iteration == 2, "it died right after the second round"
    # the labels are known by now
    killed = relabelled(processes, faults=(Fault("put", "trajectories/score/iteration=000003"),))
    assert killed.wait() == -signal.SIGKILL, killed.text
    fitted = open_run(f"file://{processes.folder}/runs/round-fit").state
    child = relabelled(processes)
    assert child.wait() == 0, child.text
    assert "steps (loss" not in child.text, "the fit is done"
    fork = open_run(f"file://{processes.folder}/runs/round-run")
    assert fork.state.iteration == 4
    assert fork.config.reward.model is not None
    assert fork.config.reward.model.path == str(processes.folder / "round-model")
    assert fork.trajectories(2, ["response"]).equals(parent.trajectories(2, ["response"])), "it shares what was before"
    assert open_run(f"file://{processes.folder}/runs/round-fit").state.weights == fitted.weights
    found = verdict(processes)
    assert found["new"] > found["old"], f"{found}"
    said = re.search(r"ranks ([\d.]+)% of (\d+) held-out pairs? as labelled, the old one ([\d.]+)%", child.text)
    assert said is not None, child.text
    assert [float(said[1]), int(said[2]), float(said[3])] == pytest.approx(
        [100 * found["new"], found["pairs"], 100 * found["old"]], abs=0.06
    )
    sides = [pd.read_parquet(processes.folder / "runs" / "round" / f"{name}.parquet") for name in ("train", "held_out")]
    prompts = [{json.dumps([dict(message) for message in row]) for row in side["prompt"]} for side in sides]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1], "no prompt is on both sides"
    check_scores(fork.trajectories(3), processes.folder / "round-model")

    other = labelled(processes, better=False)
    refused = relabelled(processes, "--labels", other)
    assert refused.wait() == 2
    assert "round has other labels already" in refused.text and "--run" in refused.text


def check_scores(rows: pd.DataFrame, folder: Path) -> None:
    """They are those of the model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    for row in rows.head(8).to_dict("records"):
        prompt = "\n".join(message["content"] for message in json.loads(row["messages"]))
        # a response that spells a special token is read letter by letter
        ids = torch.tensor([tokenizer.convert_tokens_to_ids([*prompt, *row["response"], "<eos>"])])
        with torch.no_grad():
            assert row["model_score"] == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-4)  # stored in float32


def check_pairs(pairs: pd.DataFrame, parent: Run) -> None:
    """They are those whose scores differ least, one of a prompt."""
    rows = parent.trajectories()
    gaps = []
    for _, group in rows.groupby(["iteration", "prompt_id"]):
        scores = np.sort(group.drop_duplicates("response")["model_score"])
        gaps += [np.diff(scores).min()] if len(scores) > 1 else []
    found = (pairs["model_score_a"] - pairs["model_score_b"]).abs()
    np.testing.assert_allclose(sorted(found), sorted(gaps)[:40], atol=1e-6)  # scores are float32
    assert (pairs["answer_a"] != pairs["answer_b"]).all()
    expected = 1 / (1 + np.exp(pairs["model_score_b"] - pairs["model_score_a"]))
    np.testing.assert_allclose(pairs["probability_a"], expected)
    by_id = rows.set_index("trajectory_id")
    for pair in pairs.to_dict("records"):
        for side in "ab":
            original = by_id.loc[pair[f"trajectory_id_{side}"]]
            assert (original["response"], original["prompt"]) == (pair[f"answer_{side}"], pair["prompt"])
    assert 8 < (pairs["model_score_a"] > pairs["model_score_b"]).sum() < 32, "the order says nothing"


def test_a_judge_labels_and_a_worse_model_is_refused(parent: Run, processes: Processes) -> None:
    with judge_server(key="secret") as judge:
        address = ("--judge", f"url={judge.url}", "--judge", "model=m")
        child = relabelled(processes, *address)
        assert child.wait() == 2 and "answered 401" in child.text, child.text
        assert "repeat the command, which asks only what is missing" in child.text
        judge.key = None
        child = relabelled(processes, *address)
        assert child.wait() == 0, child.text
        asked = judge.requests
        assert verdict(processes)["new"] > verdict(processes)["old"]
        again = relabelled(processes, *address)
        assert again.wait() == 0, again.text
        assert judge.requests == asked, "what was answered is kept"

    # labels of which the held-out ones say the opposite of the others
    assert relabelled(processes, name="bad").wait() == 0
    path = labelled(processes, "bad")
    first = relabelled(
        processes, "--labels", path, name="bad", faults=(Fault("create", '{"kind":"close","iteration":0'),)
    )
    assert first.wait() == -signal.SIGKILL
    held_out = pd.read_parquet(processes.folder / "runs" / "bad" / "held_out.parquet")
    assert relabelled(processes, name="worse").wait() == 0
    turned = {json.dumps([dict(message) for message in row]) for row in held_out["prompt"]}
    pairs = pd.read_parquet(processes.folder / "runs" / "worse" / "pairs.parquet")
    is_turned = {
        pair["pair_id"]: json.dumps([dict(message) for message in pair["messages"]]) in turned
        for pair in pairs.to_dict("records")
    }
    rows = [json.loads(line) for line in labelled(processes, "worse").read_text().splitlines()]
    scores = pairs.set_index("pair_id")
    for row in rows:
        if is_turned[row["pair_id"]]:  # as the old model has it, which is then always right
            pair = scores.loc[row["pair_id"]]
            row["preferred"] = "a" if pair["model_score_a"] > pair["model_score_b"] else "b"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = relabelled(processes, "--labels", path, name="worse")
    assert refused.wait() == 1, refused.text
    assert "the new reward model is worse than the old one, so base is not forked: label more pairs" in refused.text
    assert not (processes.folder / "runs" / "worse-run").exists()


def test_what_does_not_fit_is_said(parent: Run, processes: Processes) -> None:
    assert relabelled(processes).wait() == 0
    for more, says in (
        (("--pairs", 8), "round began with other settings (pairs): repeat its command"),
        (("learning=1",), "learning"),
        (("validation=other.parquet",), "the round determines run, model, data, validation, output: remove it"),
        (("--labels", "l.jsonl", "--judge", "model=m"), "--labels and --judge both give labels"),
        (("--judge", "url=nowhere", "--judge", "model=m"), "is not the URL of a server"),
        (("--run", "base"), "there is a run base: choose another name"),
    ):
        child = relabelled(processes, *more)
        assert child.wait() == 2, child.text
        assert says in child.text
    path = processes.folder / "ties.jsonl"
    pairs = pd.read_parquet(processes.folder / "runs" / "round" / "pairs.parquet")
    path.write_text("".join(json.dumps({"pair_id": pair, "preferred": "tie"}) + "\n" for pair in pairs["pair_id"]))
    ties = relabelled(processes, "--labels", path)
    assert ties.wait() == 2
    assert "0 prompts with a label that is no tie: label pairs of two prompts at least" in ties.text
    config = tiny.config(
        processes.folder, run__name="rule", run__store=f"file://{processes.folder}/runs", train__iterations=1
    )
    assert processes.train(config).wait() == 0
    store = f"file://{processes.folder}/runs"
    child = processes.cli("relabel", "rule", "--run", "r", "--store", store)
    assert child.wait() == 2
    assert "has no reward.model that scores whole responses: name a run that has one" in child.text


def test_no_prompt_is_learned_from_and_held_out(tmp_path: Path) -> None:
    rows = [
        {
            "pair_id": f"p{number}",
            "prompt": f"q{number}",
            "answer_a": "yes",
            "answer_b": "no",
            "messages": [{"role": "user", "content": f"q{number}"}],
            "tools": TOOLS if number else None,
        }
        for number in range(4)
    ]
    pairs = Pairs(pa.Table.from_pylist(rows), "")
    also = tmp_path / "also.jsonl"
    also.write_text("".join(json.dumps({"prompt": f"q{n}", "chosen": "1", "rejected": "2"}) + "\n" for n in range(6)))
    round_ = Relabel(
        parent=f"file://{tmp_path}/base",
        name="round",
        pairs=4,
        window=None,
        held_out=0.5,
        also=(str(also),),
        output=str(tmp_path / "model"),
    )
    labels = Labels({"p0": "a", "p1": "b", "p2": "a", "p3": "b"}, 0)
    for _ in range(2):  # what is written stays
        assert split(round_, pairs, labels) == Split(learned=2, held_out=2, also=4, left_out=2)
    sides = [pd.read_parquet(tmp_path / "round" / f"{name}.parquet") for name in ("train", "held_out")]
    prompts = [{row[0]["content"] for row in side["prompt"]} for side in sides]
    assert prompts[0] | prompts[1] == {f"q{n}" for n in range(6)} and not prompts[0] & prompts[1]
    by_prompt = {row["prompt"][0]["content"]: row for side in sides for row in side.to_dict("records")[:2]}
    assert [by_prompt[f"q{n}"]["tools"] for n in range(1, 4)] == [TOOLS] * 3
    assert [by_prompt[f"q{n}"]["chosen"][0]["content"] for n in range(4)] == ["yes", "no", "yes", "no"]
    also.write_text(json.dumps({"prompt": "q9", "chosen": "1", "rejected": "2"}))
    with pytest.raises(UserError, match=r"the preferences of --also .* have changed since round began: undo that"):
        split(round_, pairs, labels)
