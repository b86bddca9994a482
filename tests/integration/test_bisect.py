"""`ratchet bisect`: a run whose reward was exploited, and one whose reward was not."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from ratchet.flows.train import train
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.errors import UserError
from ratchet.tasks.analysis import onset as search
from ratchet.tasks.analysis.bisect import bisect
from tests import tiny
from tests.integration.test_cli import Ratchet, ratchet  # noqa: F401  (a fixture)

STRICT = "tests.strict_rewards:distinct_letters"


@pytest.fixture(scope="module")
def hacked(common: Path, workspace: Path, prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is paid for letters, and ends in repeating one letter."""
    store = tmp_path_factory.mktemp("hacked")
    config = tiny.config(
        workspace,
        run__name="hacked",
        run__store=f"file://{store}",
        reward__function="tests.rewards:letters",
        algorithm__kl={},
        algorithm__advantage={"type": "grpo"},
        rollout__n=16,
        actor__lr=1e-2,
        train__iterations=12,
    )
    train(config)
    return open_run(f"file://{store}/hacked")


def test_the_iteration_is_found(hacked: Run) -> None:
    rescored, found = bisect(hacked, STRICT)
    assert found is not None
    iterations = [entry.iteration for entry in rescored]
    assert {0, 11, found.iteration, found.iteration - 1} <= set(iterations) and len(iterations) <= 6
    by_iteration = {entry.iteration: entry for entry in rescored}
    threshold = by_iteration[0].gap + search.SHARE * (by_iteration[11].gap - by_iteration[0].gap)
    assert by_iteration[found.iteration].gap > threshold >= by_iteration[found.iteration - 1].gap
    assert found.onset.low <= found.iteration <= found.onset.high
    rows = hacked.trajectories(found.iteration)
    assert by_iteration[found.iteration].reward == pytest.approx(rows["score"].mean())
    strict = [len({letter for letter in text if "a" <= letter <= "m"}) / max(len(text), 1) for text in rows["response"]]
    assert by_iteration[found.iteration].strict == pytest.approx(np.mean(strict))
    examples = found.examples
    assert (examples["score"] - examples["strict"] > threshold).all() and len(examples)
    assert examples["advantage"].is_monotonic_decreasing


def test_a_reward_that_agrees_is_no_hack(hacked: Run) -> None:
    rescored, found = bisect(hacked, "tests.rewards:letters")
    assert found is None and [entry.iteration for entry in rescored] == [0, 11]
    assert all(abs(entry.gap) < 1e-6 for entry in rescored), "scores are stored in float32"


def test_the_command_shows_trajectories_and_a_fork_that_works(hacked: Run, ratchet: Ratchet) -> None:  # noqa: F811
    store = ("--store", hacked.store.url.rpartition("/")[0])
    before = hacked.store.objects.list("")
    code, out, err = ratchet("bisect", "hacked", "--reward", STRICT, "--examples", 2, *store)
    assert code == 0, err
    assert hacked.store.objects.list("") == before, "nothing is written"
    assert "the gap opens in the generations of iteration" in out
    assert "how sure this is: the 90 % interval is iteration" in out
    assert out.count(": score ") == 2
    *_, command = out.strip().splitlines()
    words = command.split()
    assert words[:2] == ["ratchet", "fork"]
    code, out, err = ratchet(*[word.replace("NEW", "strict") for word in words[1:]], *store)
    assert code == 0, err
    code, out, err = ratchet("plan", "strict", *store)
    assert code == 0, err
    code, out, err = ratchet("bisect", "hacked", "--reward", "tests.rewards:no_such", *store)
    assert code == 2 and "no_such" in err and len(err.splitlines()) == 1


def test_the_command_for_a_narrower_interval_works(hacked: Run, ratchet: Ratchet) -> None:  # noqa: F811
    """Until it is one iteration, or all of it is scored, what the command says is followed."""
    command = ["bisect", "hacked", "--reward", STRICT, "--store", hacked.store.url.rpartition("/")[0]]
    scored = []
    while True:
        code, out, err = ratchet(*command)
        assert code == 0, err
        found = re.search(r"\((\d+) iterations of 12 scored again\)", out)
        assert found is not None
        scored.append(int(found[1]))
        again = re.search(r"`ratchet (bisect [^`]*)` scores \d+ more of these to narrow it", out)
        if again is None:
            break
        command = shlex.split(again[1])
    assert "interval is iteration " in out or "all that could narrow it are scored" in out
    assert scored == sorted(set(scored)), "each scored more than the one before"
    _, found_by_all = bisect(hacked, STRICT, more=10)
    assert found_by_all is not None and found_by_all.onset.unseen == 0


def test_a_run_that_is_too_short(shown_runs: Path) -> None:
    with pytest.raises(UserError, match="has closed 0 iterations: bisect needs two at least"):
        bisect(open_run(f"file://{shown_runs}/new"), STRICT)
