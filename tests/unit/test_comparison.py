"""Comparing runs: the maths on simulated scores, and reading runs whose scores are known."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ratchet.flows.commands.comparison_tables import show
from ratchet.infra.runs.comparison import Comparison, PairedScores, compare, interval, verdict_of
from ratchet.infra.runs.forks import fork
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.records import ShardCommit, StageCommit
from ratchet.infra.store.run_store import VALIDATE, RunStore
from ratchet.rlhf.errors import UserError
from tests.padded import properties
from tests.stored import STORED
from tests.unit.test_reading_runs import Command, command  # noqa: F401  (a fixture)

SCORES = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.floats(-1, 1, width=32), st.floats(-1, 1, width=32)), min_size=1
)
STEPS = st.none() | st.lists(st.floats(-1, 1), max_size=4)


def paired(rows: Sequence[tuple[str, float, float]]) -> PairedScores:
    return PairedScores.of(*zip(*rows, strict=True))


@properties
@given(SCORES, STEPS)
def test_exchanging_the_runs_negates_the_difference(rows: list[tuple[str, float, float]], steps: Any) -> None:
    scores, swapped = paired(rows), paired([(prompt, b, a) for prompt, a, b in rows])
    assert swapped.difference == -scores.difference
    low, high = interval(scores, steps)
    swapped_low, swapped_high = interval(swapped, None if steps is None else [-step for step in steps])
    # float32 products are rounded alike for both signs; the quantiles interpolate from the other end
    assert (swapped_low, swapped_high) == pytest.approx((-high, -low), abs=1e-9)


@properties
@given(SCORES)
def test_the_same_scores_show_no_difference(rows: list[tuple[str, float, float]]) -> None:
    scores = paired([(prompt, a, a) for prompt, a, _ in rows])
    low, high = interval(scores, [])
    assert scores.difference == 0
    assert verdict_of(low, high, 2) == ("cannot tell" if len(scores.answers) == 1 else "no difference")
    assert (low, high) == (0, 0) or len(scores.answers) == 1


def test_one_prompt_shows_nothing() -> None:
    low, high = interval(paired([("a", 0.0, 1.0)] * 100), [0.5])
    assert (low, high) == (-np.inf, np.inf)


def test_an_interval_holds_the_true_difference_between_prompts() -> None:
    generator, truth, trials, covered = np.random.default_rng(0), 0.1, 400, 0
    for _ in range(trials):
        # 60 prompts with 4 answers each that B solves more often, by an amount of the prompt's own
        easy, gain = generator.uniform(0.2, 0.6, 60), generator.normal(truth, 0.04, 60)
        a, b = ((generator.random((60, 4)) < rate[:, None]).ravel() for rate in (easy, easy + gain))
        low, high = interval(PairedScores.of(np.arange(60).repeat(4).tolist(), a, b))
        covered += low <= truth <= high
    # of a share of 400, the standard deviation is 1.1 %; a bootstrap of 60 prompts is up to 1 % too narrow
    assert 0.915 < covered / trials < 0.98


def verdicts(effect: float, trials: int = 200, prompts: int = 400) -> list[str]:
    """Verdicts on pairs of simulated runs, validated six times on `prompts`: both learn, and each has luck of its
    own, which it keeps (a random walk that ends at 0.03: two runs differ by more than the noise of 400 prompts, 0.03).
    B also has an effect, which grows as they learn. Scores are 0 or 1."""
    generator, found = np.random.default_rng(0), []
    for _ in range(trials):
        easy = generator.uniform(0.05, 0.4, prompts)
        luck = generator.normal(0, 0.03 / np.sqrt(6), (6, 2)).cumsum(0)
        differences = []
        for time in range(6):
            gains = 0.05 * time + luck[time] + np.array([0, effect]) * (time + 1) / 6
            a, b = (generator.random(prompts) < np.clip(easy + gain, 0, 1) for gain in gains)
            scores = PairedScores.of(np.arange(prompts).tolist(), a, b)
            differences.append(scores.difference)
        found.append(verdict_of(*interval(scores, np.diff(differences).tolist()), 1))
    return found


def test_runs_that_differ_in_luck_alone_show_no_difference_19_of_20_times() -> None:
    assert verdicts(effect=0).count("no difference") >= 190


def test_few_prompts_cannot_tell() -> None:
    alike = verdicts(effect=0, prompts=10)
    assert alike.count("cannot tell") >= 190
    assert alike.count("B is better") + alike.count("B is worse") <= 10


@pytest.mark.parametrize("prompts", [10, 20, 40])
def test_no_difference_excludes_one_of_half_the_range(prompts: int) -> None:
    found = verdicts(effect=0.5, prompts=prompts)
    assert found.count("no difference") <= 10
    assert found.count("B is worse") <= 5


def test_an_effect_is_found() -> None:
    assert verdicts(effect=0.25).count("B is better") >= 180
    assert verdicts(effect=-0.25, trials=50).count("B is worse") >= 45


# Reading


ROWS = ("1 + 1", "2 + 2", "3 + 3", "4 + 4", "5 + 5", "6 + 6", "7 + 7", "8 + 8")


def made(
    folder: Path,
    name: str,
    validations: Sequence[Sequence[float]],
    prompts: Sequence[str] = ROWS,
    code: str = "none",
    **changes: Any,
) -> Run:
    """A run whose validations have these scores, one before each iteration: real files and records, no model."""
    stored = open_run(f"file://{STORED}/run").state.claim
    assert stored is not None
    config = stored.config
    for key, value in {"validation__solved_score": 1.0, **changes}.items():
        section, _, last = key.partition("__")
        config = config | {section: config[section] | {last: value}}
    store = RunStore.at(f"file://{folder}/{name}")
    store.log.claim(stored.model_copy(update={"config": config}))
    for iteration, scores in enumerate(validations):
        ids = [f"it{iteration:06d}-p{number:05d}" for number in range(len(scores))]
        rows = {
            "trajectory_id": [f"{prompt}-s00" for prompt in ids],
            "prompt_id": ids,
            "sample": pa.array([0] * len(scores), pa.int32()),
            "data_source": ["plus" if number % 2 else "sum" for number in range(len(scores))],
            "prompt": list(prompts)[: len(scores)],
            "response": [f"{name}\x1b[2J says {score}" for score in scores],
            "score": pa.array(scores, pa.float32()),
            "reward_error": pa.array([None] * len(scores), pa.string()),
            "rollout_error": pa.array([None] * len(scores), pa.string()),
        }
        place: dict[str, Any] = {"iteration": iteration, "stage": VALIDATE}
        shard = store.write_shard(iteration, VALIDATE, 0, 0, pa.table(rows))
        committed = ShardCommit(**place, shard=0, data=shard, term=1, seconds=0.0)
        times, parts = {"began": 0.0, "ended": 1.0, "seconds": 1.0}, Fingerprint(parts={"reward": code})
        manifest = Manifest(
            **place, term=1, attempt=0, fingerprint=parts, config={}, metrics={}, shards=(shard,), **times
        )
        commit = StageCommit(**place, manifest=store.write_manifest(manifest), fingerprint=parts.digest)
        store.commit(committed, commit)
        if iteration < len(validations) - 1:
            store.close({"response_length/mean": 9.0 + iteration, "actor/ref_kl": 0.5})
    return open_run(store.url)


def test_validations_of_two_seeds_are_paired_by_prompt(tmp_path: Path) -> None:
    a = made(tmp_path, "a", [[0] * 8, [0, 1, 0, 1, 0, 1, 0, 1]])
    b = made(tmp_path, "b", [[0] * 8, [1, 1, 1, 1, 1, 0, 1, 1]], run__seed=1)
    result = compare(a, b)
    found = {(entry.iteration, entry.data_source): entry for entry in result.differences}
    assert found.keys() == {(iteration, source) for iteration in (0, 1) for source in ("sum", "plus", "all")}
    assert (found[1, "sum"].a, found[1, "sum"].b, found[1, "sum"].difference) == (0, 1, 1)
    assert (found[1, "plus"].difference, found[1, "plus"].prompts) == (-0.25, 4)
    assert found[1, "all"].difference == result.difference == 0.375
    assert (found[0, "all"].low, found[0, "all"].high) == (0, 0)
    assert (result.kind, result.iteration, result.validations, result.prompts) == ("validation", 1, 1, 8)
    assert (result.config, result.same_seed, result.fork) == (("run.seed 0 -> 1",), False, None)
    assert result.flips is not None
    assert [(flip.prompt, flip.solved_by) for flip in result.flips] == [
        ("1 + 1", "B"),
        ("3 + 3", "B"),
        ("5 + 5", "B"),
        ("6 + 6", "A"),
        ("7 + 7", "B"),
    ]
    assert [answer.response for answer in result.flips[0].b] == ["b\x1b[2J says 1"]
    assert [(entry.kl, entry.length) for entry in result.beside] == [((0.5, 0.5), (9.0, 9.0))] * 2
    back = compare(b, a)
    assert (back.low, back.high) == pytest.approx((-result.high, -result.low))


def test_more_validations_show_the_noise_of_training(tmp_path: Path) -> None:
    calm, wild = [[0, 0, 0, 0, 1, 1, 1, 1]] * 5, [[0] * 8, [1] * 8, [0] * 8, [1] * 8, [0, 0, 0, 0, 1, 1, 1, 1]]
    better = [[0, 0, 1, 1, 1, 1, 1, 1]] * 5
    a, b, c = made(tmp_path, "a", calm), made(tmp_path, "b", better), made(tmp_path, "c", [*wild[:4], better[0]])
    steady, moved = compare(a, b), compare(a, c)
    assert steady.difference == moved.difference == 0.25
    assert steady.validations == moved.validations == 4  # not the one before training
    assert moved.high - moved.low > 2 * (steady.high - steady.low)


def test_prompts_that_one_run_lacks_are_left_out_and_counted(tmp_path: Path) -> None:
    a = made(tmp_path, "a", [[0] * 8, [1] * 8])
    b = made(tmp_path, "b", [[0] * 8, [0] * 8], prompts=(*ROWS[:4], *"wxyz"))
    result = compare(a, b)
    assert {entry.prompts for entry in result.differences if entry.data_source == "all"} == {4}
    assert result.unpaired["validation"] == 2 * 2 * 4
    assert result.falls_short(0.0)
    assert result.falls_short(-0.5)
    assert not result.falls_short(-1.5)
    with pytest.raises(UserError, match=r"a and c have no prompt in common: .*the same prompts in validation.data"):
        compare(a, made(tmp_path, "c", [[0] * 8], prompts="stuvwxyz"))


def test_what_was_not_validated_is_said(tmp_path: Path) -> None:
    a, b = made(tmp_path, "a", [[0] * 8]), made(tmp_path, "b", [])
    with pytest.raises(UserError, match=r"0 iterations and 0 iterations, and none that both .*Set validation.data"):
        compare(a, b)
    other = made(tmp_path, "c", [], run__seed=1)
    with pytest.raises(UserError, match=r"another run.seed each trains on other prompts"):
        compare(a, other)


def printed(comparison: Comparison) -> str:
    shown = io.StringIO()
    show(Console(file=shown, width=1000), comparison, 0, None, "table")
    return shown.getvalue()


def test_an_interval_that_is_too_wide_cannot_tell(tmp_path: Path) -> None:
    a, b = made(tmp_path, "a", [[0] * 8, [0, 1, 0, 5]]), made(tmp_path, "b", [[0] * 8, [0, 0, 5, 0]])
    result = compare(a, b)
    assert result.high - result.low > 0.5 * result.spread == 2.5
    assert (result.verdict, result.doubt) == ("cannot tell", "wide interval"), "of four prompts"
    assert "wider than half of the range of scores, 5, in" in printed(result)
    a, b = made(tmp_path, "c", [[0]]), made(tmp_path, "d", [[1]])
    result = compare(a, b)
    assert (result.verdict, result.doubt, result.low) == ("cannot tell", "one prompt", None)
    assert "without an interval, since there is only one prompt" in printed(result)


def test_a_fork_is_compared_from_where_it_begins(tmp_path: Path) -> None:
    a = made(tmp_path, "a", [[0, 1] * 4] * 4)
    for child, at in (("b", 2), ("c", 1)):
        fork(a.store, RunStore.at(f"file://{tmp_path}/{child}").objects, a.state.claim.config, at, [VALIDATE], str(at))
    b, c = (open_run(f"file://{tmp_path}/{child}") for child in "bc")
    result = compare(a, b)
    assert (result.fork, result.iteration, result.same_seed) == ("2", 2, True)
    assert {entry.iteration for entry in result.differences} == {2}, "what is shared is not compared"
    assert (result.low, result.verdict) == (0, "no difference")
    assert compare(c, b).fork == compare(b, c).fork == "1", "siblings part where the first of them does"


def test_the_command_prints_what_it_found(command: Command, tmp_path: Path) -> None:  # noqa: F811
    made(command.folder, "a", [[0] * 8, [1] * 8])
    made(command.folder, "b", [[0] * 8, [0] * 8], run__seed=1)
    store = ("--store", f"file://{command.folder}")
    out = command("compare", "a", "b")
    assert "B is worse: -1.000, 95 % interval -1.000 to -1.000" in out
    assert "over 8 prompts\nthe interval covers the noise of the prompts, and a guess at that of training, which" in out
    assert "B solves 0 prompts that A does not, and A 8 that B does not" in out
    assert "prompts that flipped: the first 5 of 8" in out
    assert "\\x1b[2J" in out and "\x1b[2J" not in out, "nothing that a model wrote acts on the terminal"
    code, out, _ = command.ratchet("compare", "a", "b", "--at-least", "0", *store)
    assert code == 1
    assert out.endswith("--at-least 0: fails, the whole interval is below 0\n")
    code, out, _ = command.ratchet("compare", "a", "b", "--at-least", "-1.5", "--format", "json", *store)
    assert code == 0
    assert json.loads(out)["verdict"] == "B is worse"
    assert "is it run?" in command.error("compare", "a", "rum")


def test_the_command_says_which_rewards_differ_and_what_to_do(command: Command) -> None:  # noqa: F811
    options = {"mine.py:score": {"strict": True}}
    made(command.folder, "a", [[0] * 8, [0, 1] * 4])
    made(command.folder, "b", [[0] * 8, [1, 0] * 4], reward__function="mine.py:score", reward__options=options)
    made(command.folder, "c", [[0] * 8, [1, 0] * 4], reward__function="constant", run__seed=1)
    made(command.folder, "d", [[0] * 8, [1, 0] * 4], code="abcdef0123456789")
    at = f"file://{command.folder}"
    text = '{"mine.py:score": {"strict": true}}'
    values = f"reward.function=mine.py:score 'reward.options={text}'"
    out = command("compare", "a", "b")
    assert "A is scored by the reward model (reward.options {})\n" in out
    assert f"B is scored by mine.py:score + the reward model (reward.options {text})\n" in out
    assert f"`ratchet rescore {at}/a --run a-rescored {values}`, then `ratchet compare {at}/a-rescored {at}/b`" in out
    assert f"`ratchet evaluate {at}/a reward.function=constant`" in command("compare", "a", "c")
    out = command("compare", "a", "d")
    assert "A is scored by the reward model (code none)\n" in out
    assert "B is scored by the reward model (code abcdef012345)\n" in out
    again = [f"`ratchet rescore {at}/{name} --run {name}-rescored`" for name in "ad"]
    assert f"{', then '.join(again)}, then `ratchet compare {at}/a-rescored {at}/d-rescored`" in out
    made(command.folder, "e", [[0] * 8, [1, 0] * 4], code="abcdef0123456789", run__seed=1)
    out = command("compare", "a", "e")
    assert f"now: `ratchet evaluate {at}/a`, then `ratchet evaluate {at}/e`, and compare what they print\n" in out
    assert "ratchet rescore" not in out, "such runs would have nothing in common"
    assert "is scored by" not in command("compare", "a", "a")


@pytest.mark.parametrize("difference", [{"reward__function": "constant"}, {"code": "abcdef0123456789"}])
def test_scores_of_different_rewards_have_no_verdict(
    command: Command,  # noqa: F811
    difference: Any,
) -> None:
    made(command.folder, "a", [[0, 1] * 4] * 5)
    made(command.folder, "b", [[1] * 8] * 5, **difference)
    at_least = ("compare", "a", "b", "--at-least", "-9", "--store", f"file://{command.folder}")
    code, out, _ = command.ratchet(*at_least)
    assert code == 1
    assert "cannot tell: the scores are of different rewards, in the validation before iteration 4" in out
    assert out.endswith("--at-least -9: fails, scores of different rewards cannot be compared\n")
    code, out, _ = command.ratchet(*at_least, "--format", "json")
    found = json.loads(out)
    assert (code, found["verdict"], found["doubt"]) == (1, "cannot tell", "different rewards")


@pytest.mark.parametrize("score", [0, 1])
def test_scores_that_are_all_equal_cannot_tell(command: Command, score: float) -> None:  # noqa: F811
    for name in "ab":
        made(command.folder, name, [[0, 1] * 4, [score] * 8])
    result = compare(*(open_run(f"file://{command.folder}/{name}") for name in "ab"))
    assert (result.verdict, result.doubt, result.low, result.high) == ("cannot tell", "equal scores", None, None)
    assert not result.falls_short(0.5), "nothing is known with confidence"
    out = command("compare", "a", "b", "--at-least", "0")
    assert "cannot tell: all scores are equal, in the validation before iteration 1 over 8 prompts\n" in out
    assert out.endswith("--at-least 0: holds, there is no interval that could be below it\n")
