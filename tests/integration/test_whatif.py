"""`ratchet whatif`: updates under other settings, compared with those that forks with the same settings make."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet.flows.train import train
from ratchet.infra.observe.importing import import_run
from ratchet.infra.observe.sources.jsonl import JSONLines
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.errors import UserError
from ratchet.tasks.analysis.plan import fork_run
from ratchet.tasks.analysis.whatif import WhatIf, by_gain, newest, parse_arms, parse_iterations, whatif
from tests import tiny
from tests.integration.test_cli import Ratchet, ratchet  # noqa: F401  (a fixture)
from tests.processes import Fault, Processes

LETTERS = "tests.rewards:letters"


def trained(workspace: Path, store: Path, name: str, **changes: Any) -> Run:
    config = tiny.config(
        workspace,
        run__name=name,
        run__store=f"file://{store}",
        reward__function=LETTERS,
        data__prompts_per_iteration=8,
        checkpoint__every=2,
        **changes,
    )
    train(config)
    return open_run(f"file://{store}/{name}")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judged")


@pytest.fixture(scope="module")
def grpo(workspace: Path, store: Path, prefect_server: str) -> Run:
    """Four optimizer steps an iteration, with a learning rate at which tokens are clipped."""
    changes = {"algorithm__kl": {}, "algorithm__advantage": "grpo", "actor__lr": 3e-3, "rollout__n": 4}
    return trained(workspace, store, "grpo", **changes, actor__mini_batch_trajectories=8)


@pytest.fixture(scope="module")
def ppo(workspace: Path, store: Path, prefect_server: str) -> Run:
    """With a critic, a reference and a KL penalty."""
    return trained(workspace, store, "ppo", train__iterations=2)


@pytest.fixture(scope="module")
def plain(workspace: Path, store: Path, prefect_server: str) -> Run:
    """REINFORCE: one optimizer step, without clipping of any kind."""
    changes: dict[str, Any] = {"algorithm__kl": {}, "algorithm__advantage": "reinforce_plus_plus"}
    one_step: dict[str, Any] = {"actor__grad_clip": None} | {
        "actor__mini_batch_trajectories": 32,
        "rollout__n": 4,
        "train__iterations": 2,
    }
    return trained(workspace, store, "plain", **changes, **one_step, algorithm__loss="gpg")


def judged(run: Run, iterations: Sequence[int], *settings: str) -> list[WhatIf]:
    return list(whatif(run, iterations, parse_arms(settings)))


def content(run: Run) -> dict[str, str]:
    """The digest of every object of a run."""
    objects = run.store.objects
    return {key: hashlib.sha256(objects.get(key)).hexdigest() for key in objects.list("")}


def metrics(run: Run, iteration: int) -> dict[str, float]:
    stored = run.store.manifests(iteration)["update_actor"].metrics
    return {name: value for name, value in stored.items() if name.startswith("actor/")}


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_runs_own_settings_change_nothing(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    own = f"algorithm.advantage={run.config.algorithm.advantage.type} reward.function={LETTERS}"
    results = judged(run, range(2), own)
    assert [result.iteration for result in results] == [0, 1]
    for result in results:
        assert result.changed_scores == 0 and result.score[0] == result.score[1]
        assert result.changed_signs == 0 and result.selected[0] == result.selected[1]
        assert result.update is not None and result.update.norm == result.made.norm > 0
        assert result.update.cosine == pytest.approx(1, abs=1e-9)
        stored = metrics(run, result.iteration)
        assert {"actor/grad_norm", "actor/pg_clipfrac"} <= stored.keys()
        assert result.update.metrics == result.made.metrics == stored
    first, last = results
    assert first.objective is not None and first.objective.change == pytest.approx(0, abs=1e-9)
    assert first.objective.effective == pytest.approx(1) and not first.objective.differs
    assert first.objective.score == pytest.approx(run.trajectories(1)["score"].mean())
    assert (last.objective is None) == (run.state.iteration == 2)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", ["algorithm.loss.clip_ratio_high=0.01"]),
        ("grpo", ["algorithm.advantage=rloo", "actor.ppo_epochs=2"]),
        ("grpo", ["reward.function=tests.rewards:mostly_flat", "reward.on_error=drop"]),
        ("ppo", ["algorithm.advantage.lam=0.5", "actor.lr=1e-4"]),
        ("ppo", ["algorithm.advantage=grpo", "algorithm.kl.in_loss=0.1"]),
    ],
)
def test_an_arm_makes_the_update_that_a_fork_makes(
    name: str, settings: list[str], request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(name)
    [result] = judged(run, [1], " ".join(settings))
    child = f"{name}-{hashlib.sha256(' '.join(settings).encode()).hexdigest()[:8]}"
    config = run.config.with_values({"run.name": child, "train.iterations": 2}, settings)
    fork_run(run, config, 1, "score")
    train(config)
    fork = open_run(run.store.url.replace(f"/{name}", f"/{child}"))
    assert result.update is not None and result.update.metrics == metrics(fork, 1) != metrics(run, 1)
    before, after = run.trajectories(1), fork.trajectories(1)
    assert result.score == pytest.approx((before["score"].mean(), after["score"].mean()))
    assert result.changed_scores == pytest.approx(np.mean(before["score"].to_numpy() != after["score"].to_numpy()))
    assert result.selected == (len(before), len(after))
    assert result.update.cosine is not None and result.update.cosine < 0.9999


def test_failed_rewards_can_be_left_out(grpo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("strict.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str[:1] in 'abcdefghijkl':\n"
        "        raise ValueError('not this one')\n"
        "    return len(set(solution_str)) / 10\n"
    )
    arms = [
        f"reward.function=strict.py:score reward.max_error_share=1 reward.on_error={how}" for how in ("drop", "zero")
    ]
    dropped, scored = judged(grpo, [1], *arms)
    failed = sum(text[:1] in "abcdefghijkl" for text in grpo.trajectories(1)["response"])
    assert dropped.selected == (32, 32 - failed) and 0 < failed < 32
    assert scored.selected == (32, 32) and scored.score == dropped.score
    assert scored.update is not None and dropped.update is not None
    assert scored.update.metrics != dropped.update.metrics


def test_a_run_of_another_trainer_is_refused(tmp_path: Path) -> None:
    rows = [{"step": 1, "prompt": "a", "response": text, "score": 1.0} for text in "bc"]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    mapping = {"iteration": "step", "response": "response", "score": "score"}
    import_run(JSONLines(tmp_path / "rows.jsonl", mapping), "theirs", f"file://{tmp_path}/runs")
    run = open_run(f"file://{tmp_path}/runs/theirs")
    with pytest.raises(UserError, match="cannot compute its updates again") as refused:
        judged(run, [0], "actor.lr=1e-4")
    assert len(str(refused.value).splitlines()) == 1


def test_a_flipped_reward_turns_the_update_round(plain: Run) -> None:
    [result] = judged(plain, [0], f"reward.function={{'{LETTERS}': -1.0}}")
    assert result.changed_signs > 0.9 and result.score[1] == pytest.approx(-result.score[0])
    assert result.update is not None and result.update.cosine is not None
    assert result.update.cosine < -0.999
    assert result.update.norm == pytest.approx(result.made.norm, rel=1e-3)


def test_without_a_signal_there_is_no_update(grpo: Run) -> None:
    [result] = judged(grpo, [0], "reward.function=tests.rewards:same")
    assert result.update is not None and result.update.norm == 0 and result.update.cosine is None
    assert result.changed_signs > 0.5 and result.changed_scores > 0.9


def test_better_updates_are_first(grpo: Run) -> None:
    results = judged(grpo, [0, 1], f"reward.function={{'{LETTERS}': -1.0}}", "actor.lr=3.1e-3")
    (best, gain), (worst, loss) = by_gain(results)
    assert best == "actor.lr=3.1e-3" and gain is not None
    assert loss is None or loss.change < gain.change, worst


def test_the_command_writes_nothing(grpo: Run, ratchet: Ratchet) -> None:  # noqa: F811
    before = content(grpo)
    arguments = ("whatif", grpo.store.url, "--iterations", "0:2", "--set", "actor.lr=1e-4")
    code, out, err = ratchet(*arguments, "--set", "reward.function=tests.rewards:digits actor.lr=1e-2")
    assert code == 0, err
    assert "arm 1, actor.lr=1e-4:" in out and "arm 2, reward.function=tests.rewards:digits actor.lr=1e-2:" in out
    code, out, err = ratchet(*arguments, "--format", "json")
    assert code == 0, err
    document = json.loads(out)
    assert [result["iteration"] for result in document["iterations"]] == [0, 1]
    assert document["arms"][0]["arm"] == "actor.lr=1e-4"
    assert content(grpo) == before


def test_a_killed_command_leaves_the_run_as_it_was(grpo: Run, processes: Processes) -> None:
    before = content(grpo)
    arguments = ("whatif", grpo.store.url, "--iterations", "0:2", "--set", "actor.lr=1e-4")
    for step in (3, 10):  # of the run's own update, and of an arm's
        assert processes.cli(*arguments, faults=(Fault("step", count=step),)).wait() == -signal.SIGKILL
        assert content(grpo) == before


def test_mistakes_are_told_together(grpo: Run, ratchet: Ratchet) -> None:  # noqa: F811
    refused = {
        "rollout.n=8": "rollout.n changes what is generated",
        "run.seed=3": "run.seed changes what is generated",
        "algorithm.dynamic_sampling.max_prompts=64": "algorithm.dynamic_sampling changes what is generated",
        "model.lora.r=4": "model.lora changes the model",
        "actor.engine=fsdp": "actor.engine changes nothing that stored trajectories can show",
        "train.iterations=9": "train.iterations changes nothing that stored trajectories can show",
        "algorithm.advantage=gae": "the run has not stored values, which it needs",
        "algorithm.kl.in_loss=0.1": "the run has not stored ref_log_probs, which it needs",
    }
    wrong = {"actor.lr=-1": "actor.lr is -1", "reward.function=tests.rewards:no_such": "no_such"}
    settings = [word for setting in (*refused, *wrong) for word in ("--set", setting)]
    code, _, err = ratchet("whatif", grpo.store.url, "--iterations", "2:9", *settings)
    assert code == 2
    lines = err.splitlines()
    assert len(lines) == len(refused) + len(wrong) + 1
    for setting, reason in refused.items():
        [line] = [line for line in lines if f"--set {setting}: " in line]
        assert reason in line and f"`ratchet fork grpo --at 2 --run NEW {setting}`" in line
    for setting, reason in wrong.items():
        assert any(f"--set {setting}: " in line and reason in line for line in lines)
    assert "iteration 3, 4, 5, 6, 7, 8: " in err


def test_arms_and_iterations_are_parsed(grpo: Run) -> None:
    [arm] = parse_arms(["reward.function={a: 1.0, b: 2}  +algorithm.advantage=rloo"])
    assert arm.overrides == ("reward.function={a: 1.0, b: 2}", "+algorithm.advantage=rloo")
    assert parse_iterations("5:15") == range(5, 15) and parse_iterations("5") == range(5, 6)
    assert newest(grpo) == range(2, 3)
    for text in ("", "a", "5:", "5:5", "1:2:3"):
        with pytest.raises(UserError, match="--iterations"):
            parse_iterations(text)
    for options in (["actor.lr"], [""], ["actor.lr=1", "actor.lr=1"]):
        with pytest.raises(UserError, match="--set"):
            parse_arms(options)
