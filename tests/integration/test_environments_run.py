"""Runs in which the policy takes turns with an environment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer

from ratchet.infra.runs.run import open_run
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import RunConfig, load_config
from ratchet.rlhf.errors import UserError
from tests import environments, tiny
from tests.history import History
from tests.processes import Child, Fault, Processes
from tests.tiers import sampled

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def start(workspace: Path, processes: Processes) -> Any:
    def start(name: str, *faults: Fault, **changes: Any) -> tuple[RunConfig, Child]:
        settings: dict[str, Any] = {
            "rollout__environment": {"name": "tests.environments:Chatty", "options": {"worth": 0.5}, "max_turns": 6},
            "rollout__max_response_tokens": 48,
            "reward": {"function": None},
            "validation": {"data": str(workspace / "held_out.parquet"), "before_train": False},
            "train__iterations": 2,
            "actor__lr": 1e-2,
        }
        store = f"file://{processes.folder}/runs"
        config = tiny.config(workspace, run__name=name, run__store=store, **(settings | changes))
        path = processes.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return config, processes.cli("train", path, faults=faults)

    return start


@pytest.mark.promise
def test_a_run_with_tools(start: Any, workspace: Path, processes: Processes) -> None:
    template = processes.folder / "template.jinja"
    said = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"
    template.write_text("{{ tools | tojson }}" + said + "{% if add_generation_prompt %}(assistant){% endif %}")
    model = {"path": str(workspace / "model"), "dtype": "float32", "chat_template": str(template)}
    tools = {"rollout__environment": None, "rollout__tools": "tests.tool_functions:weather"}
    config, child = start(
        "tools",
        model=model,
        data__max_prompt_tokens=900,
        actor__micro_batch_tokens=4096,
        critic__micro_batch_tokens=4096,
        **tools,
    )
    assert child.wait() == 0, child.text
    assert "renders earlier messages differently" not in child.text
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    assert frame["prompt"].str.contains("The weather of the next days").all(), "the policy knows its tools"
    assert (frame["finish_reason"] != "error").all()
    assert [turn["role"] for turn in frame["turns"][0]] == ["policy"]
    more = config.with_values({"rollout.tools": ["tests.tool_functions:weather", "tests.tool_functions:shout"]})
    path = processes.folder / "more.yaml"
    path.write_text(yaml.safe_dump(more.model_dump(mode="json")))
    refused = processes.cli("train", path, "train.iterations=3")
    assert refused.wait() == 2, refused.text
    assert "rollout.environment" in refused.text, "other tools are another environment"


def test_what_the_environment_says_is_read_and_never_learned(start: Any, processes: Processes) -> None:
    config, child = start("quiet")
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    check_turns(frame)
    assert (frame["score"] == frame["environment_reward"]).all()
    assert frame["score"].nunique() > 1
    assert frame["reward_parts"].tolist() == [{"environment": score, "vowels": 2 * score} for score in frame["score"]]
    for row in frame.itertuples():
        heard = row.response_mask == 0
        assert not row.loss_mask[heard].any()
        assert not row.rollout_log_probs[heard].any()
        near = ~heard  # in float32, with the temperature 1
        if row.iteration == 0:
            np.testing.assert_allclose(row.rollout_log_probs[near], row.ref_log_probs[near], atol=1e-4)
    metrics = history.run.metrics()
    assert metrics["response_length/mean"].tolist() == pytest.approx(
        frame.groupby("iteration")["response_mask"].apply(lambda rows: rows.map(sum).mean()).tolist()
    )
    vowels = 2 * frame.groupby("iteration")["score"].mean()
    assert metrics["reward/vowels/mean"].tolist() == pytest.approx(vowels.tolist())
    turns = frame["turns"].map(len) + 1
    assert metrics["num_turns/mean"].tolist() == pytest.approx(turns.groupby(frame["iteration"]).mean().tolist())
    assert metrics["num_turns/max"].tolist() == turns.groupby(frame["iteration"]).max().tolist()
    shown = processes.cli("show", "quiet", "--store", config.run.store)
    assert shown.wait() == 0, shown.text
    assert "environment: XY" in shown.text and "turn_rewards" in shown.text
    report = processes.cli("report", "quiet", "--store", config.run.store, "-o", processes.folder / "report.html")
    assert report.wait() == 0, report.text
    assert "written by the policy" in (processes.folder / "report.html").read_text()
    held_out = history.run.validation()
    assert held_out["response"].str.contains("XY").any()
    assert processes.cli("reproduce", "quiet", "--store", config.run.store, "--iteration", 1).wait() == 0

    config, killed = start("killed", Fault("put", "trajectories/generate/iteration=000001/.*part-00001", "before"))
    assert killed.wait() == -signal.SIGKILL, killed.text
    _, resumed = start("killed")
    assert resumed.wait() == 0, resumed.text
    assert ("generate", 1, 0) not in resumed.computed_shards
    assert History.of(config).results == history.results


@pytest.mark.parametrize("estimator", ["gigpo", "turn_gae"])
def test_each_turn_earns_what_the_environment_gave_for_it(estimator: str, start: Any) -> None:
    settings: dict[str, Any] = {"algorithm__advantage": estimator, "algorithm__kl__in_reward": None, "validation": {}}
    died = Fault("put", "trajectories/advantages/iteration=000001/", "before")
    _, killed = start(estimator, died, **settings)
    assert killed.wait() == -signal.SIGKILL, killed.text
    config, resumed = start(estimator, **settings)
    assert resumed.wait() == 0, resumed.text
    assert {stage for stage, iteration, _ in resumed.computed_shards if iteration == 1} == {"advantages"}
    history = History.of(config)
    history.check_sound()
    frame, earning, different = history.run.trajectories(), 0, 0
    for row in frame.itertuples():
        policy = [turn["content"] for turn in row.turns if turn["role"] == "policy"]
        assert len(policy) == len(row.turn_ends) == len(row.turn_rewards)
        # the environment heard all of them but one that the token limit ended
        heard = [0.5 * sum(map(text.count, "aeiou")) for text in policy]
        answered = heard if row.finish_reason == "stop" else [*heard[:-1], 0.0]
        assert row.turn_rewards.tolist() == answered
        assert row.environment_reward == sum(answered)
        placed = np.zeros(len(row.response_ids))
        placed[row.turn_ends - 1] = answered
        assert row.token_rewards.tolist() == row.token_scores.tolist() == placed.tolist()
        turns = np.split(np.arange(len(placed)), row.turn_ends[:-1])
        own = [row.advantages[turn[row.response_mask[turn] == 1]] for turn in turns]
        assert all((of_turn == of_turn[0]).all() for of_turn in own)
        earning += np.count_nonzero(answered[:-1])
        different += len({of_turn[0] for of_turn in own}) > 1
    assert earning > 0 and different > len(frame) / 2, "not only the last turns"


@pytest.mark.parametrize("environment", ["Tally", "Savings"])
def test_turns_are_valued_by_playing_on_from_them(environment: str, start: Any, processes: Processes) -> None:
    """A replayable environment and a durable one, which pay at the end what was saved since the beginning."""
    folder = processes.folder / "books"
    settings: dict[str, Any] = {
        "rollout__environment": {"name": f"tests.environments:{environment}", "options": {"folder": str(folder)}},
        "rollout__continuations": 12,
        "algorithm__advantage": {"type": "vine_ppo", "whiten": False},
        "algorithm__kl__in_reward": None,
        "validation": {},
        "train__iterations": 1,
    }
    config, killed = start("mc", Fault("put", "trajectories/turn_values/.*part-00001", "before"), **settings)
    assert killed.wait() == -signal.SIGKILL, killed.text
    _, resumed = start("mc", **settings)
    assert resumed.wait() == 0, resumed.text
    again = {(stage, shard) for stage, _, shard in resumed.computed_shards}
    assert not {stage for stage, _ in again} & {"generate", "score"}
    assert ("turn_values", 0) not in again
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    halves = []
    for row in frame.itertuples():
        policy = [turn["content"] for turn in row.turns if turn["role"] == "policy"]
        saved = np.cumsum([0, *map(len, policy)])
        others = frame[(frame["prompt_id"] == row.prompt_id) & (frame["sample"] != row.sample)]["score"]
        returns = [list(values) for values in row.continuation_returns]
        assert returns[0] == others.tolist()
        assert len(returns) == len(row.turn_values) == len(policy)
        for turn, of_state in enumerate(returns[1:], 1):
            assert len(of_state) == 12
            # without the tokens limit all would be paid: what is saved so far, and at least a character a turn
            assert all(value == 0 or value >= saved[turn] for value in of_state)
            halves.append((of_state[:6], of_state[6:]))
        assert row.turn_values.tolist() == pytest.approx([np.mean(values) for values in returns])
        following = [*row.turn_values[1:], 0.0]
        expected = np.subtract(following, row.turn_values)
        expected[-1] += row.score
        for start_of, end, advantage in zip([0, *row.turn_ends[:-1]], row.turn_ends, expected, strict=True):
            is_policy = row.response_mask[start_of:end] == 1
            assert row.advantages[start_of:end][is_policy] == pytest.approx(advantage, abs=1e-4)
        check_continuations(row)
    assert len({tuple(first) for first, _ in halves}) > len(halves) / 2, "states differ"
    # means of independent halves differ by their standard error: about 95 % are within two
    within = [
        abs(np.mean(a) - np.mean(b)) <= 2 * np.sqrt((np.var(a, ddof=1) + np.var(b, ddof=1)) / 6) for a, b in halves
    ]
    assert np.mean(within) > 0.85
    if environment == "Savings":
        environments.check_books(folder)
        played_on = {entry["key"].split("/")[2] for entry in environments.entries(folder, "calls")}
        assert len([name for name in played_on if "-t01-c" in name]) == 12 * len(frame)
    metrics = history.run.metrics()
    assert metrics["turn_values/continuations"].tolist() == [12 * len(halves)]
    asked = "select trajectory_id, unnest(continuations, recursive := true) from trajectories"
    told = history.run.query(asked)
    assert len(told) == 12 * len(halves) and {"turn", "earned", "response", "response_ids"} <= {*told.columns}


def check_continuations(row: Any) -> None:
    """Asserts that what followed each turn in its continuations is stored, and explains what they earned."""
    assert [each["turn"] for each in row.continuations] == sorted(12 * list(range(1, len(row.turn_ends))))
    for each in row.continuations:
        ids, mask, turn = each["response_ids"], each["response_mask"], each["turn"]
        assert len(ids) == len(mask) <= 48 - row.turn_starts[turn]
        assert mask[0] == 1, "it begins with the policy, after the turns that it continues"
        assert each["earned"] in row.continuation_returns[turn].tolist()
        assert each["error"] is None
        if each["finish_reason"] == "stop":
            # four turns in all, of which the environment pays all letters at the end, and says their number in between
            written = "".join(c for c in each["response"] if not (c.isdigit() or c == " "))
            before = [turn["content"] for turn in row.turns[: 2 * turn : 2]]
            assert each["earned"] >= sum(map(len, before)) + len(written)
        else:
            assert each["finish_reason"] == "length" and each["earned"] == 0


@pytest.mark.parametrize("environment", ["Tally", "Savings"])
def test_a_fork_continues_a_stored_trajectory_from_a_turn(environment: str, start: Any, processes: Processes) -> None:
    """Its first iteration draws six continuations of the same two turns, and learns from nothing before them."""
    books = processes.folder / "books"
    named = {"name": f"tests.environments:{environment}", "options": {"folder": str(books)}}
    settings: dict[str, Any] = {"rollout__environment": named, "validation": {}}
    config, trained = start("saver", **settings)
    assert trained.wait() == 0, trained.text
    run = History.of(config).run
    row = next(row for row in run.trajectories(1).itertuples() if len(row.turn_ends) == 4)
    store = config.run.store

    def fork(*arguments: object, name: str = "from-turn") -> Child:
        return processes.cli("fork", "saver", "--run", name, "--store", store, *arguments)

    for arguments, says in (
        (("--trajectory", "it000001-p00000-s99", "--turn", 2), "has no trajectory it000001-p00000-s99"),
        (("--trajectory", row.trajectory_id, "--turn", 4), "has 4 turns of the policy: keep 1 to 3 of them (--turn)"),
        (("--trajectory", row.trajectory_id), "needs --turn, the number of its turns to keep"),
        (("--samples", 2), "name it with --trajectory"),
        ((), "name where the fork begins: --at K, --at K:STAGE, or --trajectory ID --turn K"),
        (
            ("--trajectory", row.trajectory_id, "--turn", 2, "rollout.environment.name=tests.environments:Chatty"),
            "Chatty cannot return to the state after a turn",
        ),
    ):
        refused = fork(*arguments)
        assert refused.wait() == 2, refused.text
        [error] = [line for line in refused.text.splitlines() if line.startswith("error: ")]
        assert says in error
    if environment == "Tally":
        stateless = fork("--trajectory", row.trajectory_id, "--turn", 2, f"rollout.environment.name={LEDGER}")
        assert stateless.wait() == 2 and "after turn 2 is not stored, so it cannot be restored" in stateless.text
    assert not (processes.folder / "runs" / "from-turn").exists(), "what is refused leaves nothing"

    assert fork("--trajectory", row.trajectory_id, "--turn", 2, "--samples", 6).wait() == 0
    forked = open_run(f"{store}/from-turn").config
    assert changed(run.config, forked) == {
        "run.name": "from-turn",
        "data.train": (f"{processes.folder}/runs/from-turn/prompts.jsonl",),
        "data.prompts_per_iteration": 1,
        "rollout.n": 6,
        # their 4 does not divide 6
        "actor.mini_batch_trajectories": None,
        "critic.mini_batch_trajectories": None,
    }
    again = fork("--trajectory", row.trajectory_id, "--turn", 2)
    assert again.wait() == 2 and "a run exists at" in again.text
    killed = processes.cli("resume", "from-turn", "--store", store, faults=(KILL_IN_FORK[environment],))
    assert killed.wait() == -signal.SIGKILL, killed.text
    child = processes.cli("resume", "from-turn", "--store", store)
    assert child.wait() == 0, child.text
    history = History.of(config.with_values({"run.name": "from-turn"}))
    history.check_sound()
    generated, end = history.run.trajectories(1, ["policy_version", "rollout_error"]), row.turn_starts[2]
    assert len(generated) == 6 and history.state.iteration == 2, "one iteration"
    assert (generated["policy_version"] == 1).all(), "the policy that wrote it"
    lost = generated["rollout_error"].dropna()
    assert lost.map(lambda error: "a crash lost the environment's answer to" in error).all()
    continued = history.run.trajectories(1)
    assert len(continued) == 6 - len(lost)
    saved = sum(len(turn["content"]) for turn in row.turns[:3:2])
    for other in continued.itertuples():
        assert other.prompt_ids.tolist() == row.prompt_ids.tolist()
        assert other.response_ids[:end].tolist() == row.response_ids[:end].tolist()
        assert not other.loss_mask[:end].any() and other.response_mask[end] == 1
        assert list(other.turns[:4]) == list(row.turns[:4])
        assert other.score == 0 or other.score >= saved
    assert row.policy_version == 1 and continued["response"].nunique() > 2, "each is drawn anew"
    if environment == "Savings":
        environments.check_books(books, drivers=2)
        asked = [entry["key"].split("/") for entry in environments.entries(books, "calls")]
        uuid = RunStore.at(f"{store}/from-turn").log.record(0).uuid
        turns = {(key[2], key[4]) for key in asked if key[0] == uuid}
        assert {turn for _, turn in turns} == {"2", "3"}, "the kept turns are not played again"
    assert processes.cli("vacuum", "from-turn", "--store", store).wait() == 0
    # a trajectory that the kill made end is not drawn to its end again
    reproduced = processes.cli("reproduce", "from-turn", "--store", store, "--iteration", 1)
    assert reproduced.wait() == (1 if len(lost) else 0), reproduced.text
    if environment == "Savings":
        effects = [entry["key"] for entry in environments.entries(books, "effects")]
        assert len(effects) == len(set(effects)), "an effect was made twice"
        runs_asked = {entry["key"].split("/")[0] for entry in environments.entries(books, "calls")}
        assert runs_asked == {uuid, RunStore.at(f"{store}/saver").log.record(0).uuid}, "the same keys"


LEDGER = "tests.environments:Savings"
KILL_IN_FORK = {
    "Tally": Fault("put", "trajectories/generate/iteration=000001/", "before"),
    # half of the turns are stored
    "Savings": Fault("put", "journals/iteration=000001/.*calls/", count=3),
}


def changed(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """Returns the new values of the keys in which two configs differ."""
    then, now = (flat(config.model_dump()) for config in (before, after))
    return {key: value for key, value in now.items() if key not in then or then[key] != value}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves


def test_turns_of_a_stored_trajectory_become_prompts(start: Any, processes: Processes) -> None:
    """Without --turn one for each turn; a fork draws from all of them."""
    named = {"name": "tests.environments:Tally", "options": {"folder": ""}}
    config, trained = start("saver", rollout__environment=named, validation={}, train__iterations=1)
    assert trained.wait() == 0, trained.text
    rows = History.of(config).run.trajectories().itertuples()
    row = next(row for row in rows if len(row.turn_ends) == 4)
    store, prompts = config.run.store, processes.folder / "prompts.jsonl"
    ratchet = partial(processes.cli, "data", "prefixes", "saver", prompts, "--store", store)
    assert ratchet("--trajectory", row.trajectory_id).wait() == 0
    assert len(prompts.read_text().splitlines()) == 3
    changes = [f"data.train={prompts}", "data.prompts_per_iteration=3", "rollout.n=4"]
    forked = processes.cli("fork", "saver", "--at", "0", "--run", "turns", "--store", store, *changes)
    assert forked.wait() == 0, forked.text
    child = processes.cli("resume", "turns", "--store", store)
    assert child.wait() == 0, child.text
    continued = History.of(config.with_values({"run.name": "turns"})).run.trajectories()
    kept = [next(i for i, ids in enumerate(other.response_mask) if ids) for other in continued.itertuples()]
    assert sorted(kept) == sorted(4 * row.turn_starts[1:].tolist())
    blind = ("rollout.environment.name=tests.environments:Chatty", "rollout.environment.options={}")
    refused = processes.cli("fork", "saver", "--at", "0", "--run", "blind", "--store", store, *changes, *blind)
    assert refused.wait() == 2 and "which continues stored turns, needs: set replayable" in refused.text


def test_an_environment_that_cannot_return_to_a_turn_is_refused(start: Any) -> None:
    _, child = start("forgetful", algorithm__advantage="vine_ppo")
    assert child.wait() == 2, child.text
    assert (
        "cannot return to the state after a turn, as algorithm.advantage vine_ppo needs: set replayable" in child.text
    )


def check_turns(frame: pd.DataFrame) -> None:
    for row in frame.itertuples():
        assert "".join(turn["content"] for turn in row.turns) == row.response
        assert [turn["role"] for turn in row.turns] == (["policy", "environment"] * 4)[: len(row.turns)]
        mask = row.response_mask
        assert len(mask) == len(row.response_ids) == len(row.rollout_log_probs) <= 48
        assert mask[0] == mask[-1] == 1
        assert row.finish_reason in ("stop", "length")
    heard = frame["response_mask"].map(lambda mask: int((np.diff(mask) == -1).sum()))
    assert heard.max() == 3
    assert frame["response"].str.contains("XY").any()


def test_tools_besides_a_rule_and_ahead_of_the_trainer(start: Any) -> None:
    """With the calculator, which a policy of random weights never calls."""
    config, child = start(
        "ahead",
        reward={"function": "tests.rewards:letters"},
        rollout__environment="calculator",
        rollout__mode="one_step_off",
    )
    assert child.wait() == 0, child.text
    frame = History.of(config).run.trajectories()
    assert frame["response_mask"].map(min).min() == 1
    assert [sorted(parts) for parts in frame["reward_parts"]] == [["environment", "rule"]] * len(frame)
    assert (frame["environment_reward"] == 0).all()


def test_a_policy_that_calls_the_calculator_reads_what_it_says(
    start: Any, processes: Processes, workspace: Path
) -> None:
    data, model = processes.folder / "calls.jsonl", processes.folder / "caller"
    prompts = pq.read_table(workspace / "prompts.parquet")["prompt"].to_pylist()
    data.write_text("".join(json.dumps({"prompt": each, "response": "<tool>6*7</tool>"}) + "\n" for each in prompts))
    made = processes.cli(
        *("sft", "--model", workspace / "model", "--data", data, "--output", model, "--steps", 150),
        *("--batch-examples", 8, "--lr", 0.01, "--store", f"file://{processes.folder}/runs"),
    )
    assert made.wait() == 0, made.text
    config, child = start(
        "calls",
        model={"path": str(model), "dtype": "float32"},
        rollout__environment={"name": "calculator", "max_turns": 2},
        rollout__max_response_tokens=96,
        reward={"function": "tests.rewards:digits"},
        validation={},
        train__iterations=1,
    )
    assert child.wait() == 0, child.text
    frame, tokenizer = History.of(config).run.trajectories(), AutoTokenizer.from_pretrained(model)
    called = frame[frame["response"].str.startswith("<tool>6*7</tool><result>42</result>")]
    assert len(called) > len(frame) / 2, "it was taught to"
    for row in called.itertuples():
        heard = tokenizer.decode(row.response_ids[row.response_mask == 0])
        assert heard == "<result>42</result>"
        assert not row.loss_mask[row.response_mask == 0].any()


def test_another_environment_is_another_run(start: Any, processes: Processes) -> None:
    mine = processes.folder / "mine.py"
    mine.write_text(Path(environments.__file__).read_text())
    settings = {"rollout__environment": {"name": f"{mine}:Chatty"}, "train__iterations": 1}
    died = Fault("put", "trajectories/generate/iteration=000000/.*part-00001", "before")
    _, killed = start("changed", died, **settings)
    assert killed.wait() == -signal.SIGKILL, killed.text
    text = mine.read_text()
    mine.write_text(text.replace("XY", "YX"))
    _, refused = start("changed", **settings)
    assert refused.wait() == 2, refused.text
    assert "generate of iteration 0 is committed, but what it depends on has changed" in refused.text
    assert "environment" in refused.text
    mine.write_text(text)
    _, resumed = start("changed", **settings)
    assert resumed.wait() == 0, resumed.text


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("Broken", "rollout.environment raised RuntimeError: not today at environments.py:"),
        ("Absent", "rollout.environment took longer than rollout.environment.timeout_s 2 s (it000000-p0000"),
    ],
)
def test_an_environment_that_fails_stops_the_run(environment: str, says: str, start: Any) -> None:
    section = {"name": f"tests.environments:{environment}", "timeout_s": 2}
    _, child = start("broken", rollout__environment=section)
    assert child.wait() == 1, child.text
    assert says in child.text.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout__environment": None}, "reward.function names no function"),
        (
            {"algorithm__advantage": "remax"},
            "does not work with algorithm.advantage remax, which does not support turns",
        ),
        (
            {"rollout__environment": None, "reward__function": "countdown", "algorithm__advantage": "gigpo"},
            "algorithm.advantage gigpo is for turns, but there is no rollout.environment",
        ),
        ({"rollout__ignore_eos": True}, "does not work with rollout.ignore_eos, which does not support turns"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], says: str, start: Any) -> None:
    with pytest.raises(UserError, match=says):
        start("refused", **changes)


@sampled(5)
@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"name": "nothing"}, "rollout.environment nothing: ModuleNotFoundError"),
        ({"name": "tests.environments:Mute"}, "Mute needs `stop`, the texts that end a turn"),
        ({"name": "tests.environments:Deaf"}, "Deaf has no method step: it needs reset("),
        (
            {"name": "calculator", "options": {"a": 1}},
            "calculator cannot be created with rollout.environment.options: ",
        ),
        (
            {"name": "tests.environments:Structured"},
            "in reset (at reset, which is tried before the run starts); ground",
        ),
    ],
)
def test_what_is_no_environment_is_refused(environment: dict[str, Any], says: str, start: Any) -> None:
    _, child = start("refused", rollout__environment=environment)
    assert child.wait() == 2
    assert says in child.text.splitlines()[-1]
    assert "Prefect" not in child.text


def played(name: str, workspace: Path, processes: Processes, **changes: Any) -> pd.DataFrame:
    """Plays an example's game for an iteration with a tiny model, after a short supervised training; returns the
    trajectories."""
    example, data, runs = EXAMPLES / name / f"{name}.py", processes.folder / name, f"file://{processes.folder}/runs"
    subprocess.run([sys.executable, example, data], check=True, capture_output=True)
    made = processes.cli(
        *("sft", "--model", workspace / "model", "--data", data / "sft.jsonl", "--output", processes.folder / "sft"),
        *("--steps", 60, "--batch-examples", 32, "--lr", 0.01, "--store", runs),
    )
    assert made.wait() == 0, made.text
    config = load_config(example.with_suffix(".yaml")).with_values(
        {
            "run.store": runs,
            "model.path": str(processes.folder / "sft"),
            "data.train": [str(data / "train.parquet")],
            "validation": {},
            "rollout.environment.name": f"{example}:{name.capitalize()}",
            "train.iterations": 1,
            **changes,
        }
    )
    path = processes.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    child = processes.cli("train", path)
    assert child.wait() == 0, child.text
    return History.of(config).run.trajectories()


def test_the_example(workspace: Path, processes: Processes) -> None:
    """The game of examples/guess, as it is, with a tiny model and few games."""
    frame = played("guess", workspace, processes)
    assert 0 < frame["score"].mean() < 0.6, "some are lucky"
    assert set(frame["finish_reason"]) >= {"stop", "turns"}
    assert frame["response"].str.contains(r"^\d+\D*(?:up|down)\D*\d+").any(), "guess, what is said, next guess"


def test_both_turns_of_the_example_are_learned(workspace: Path, processes: Processes) -> None:
    """The game of examples/ask, whose environment answers with messages: both turns enter the loss, as drawn."""
    # several mini-batches, so that old log-probs are computed
    frame = played("ask", workspace, processes, **{"actor.mini_batch_trajectories": 160})
    asked = frame[frame["turn_ends"].map(len) == 2]
    assert 0.2 < len(asked) / len(frame) < 0.8, "both moves are made"
    for row in asked.itertuples():
        own, first = row.response_mask == 1, row.turn_ends[0]
        assert own[:first].all() and not own[first] and own[-1]
        assert row.ground_truth in row.turns[1]["content"]
        assert row.score == (row.turns[2]["content"].strip() == row.ground_truth)
        assert (row.loss_mask == own).all()
        assert set(row.advantages[own]) == {row.advantages[0]}, "both turns are paid"
        np.testing.assert_allclose(row.rollout_log_probs[own], row.old_log_probs[own], atol=1e-4)
