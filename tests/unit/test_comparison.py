"""Comparing runs whose scores are known: two policies, and two settings."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from ratchet.flows.commands.comparison_tables import show
from ratchet.infra.runs.comparison import Comparison, compare
from ratchet.infra.runs.forks import fork
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.runs.settings_comparison import compare_settings
from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.records import ShardCommit, StageCommit
from ratchet.infra.store.run_store import VALIDATE, RunStore
from ratchet.rlhf.errors import UserError
from tests.stored import STORED
from tests.unit.test_reading_runs import Command, command  # noqa: F401  (a fixture)

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
    assert (result.kind, result.iteration, result.prompts) == ("validation", 1, 8)
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
    assert "over 8 prompts\none run a side cannot tell seeds from settings; " in out
    assert "`ratchet compare A1 A2 A3 -- B1 B2 B3` can" in out
    assert "B solves 0 prompts that A does not, and A 8 that B does not" in out
    assert "prompts that flipped: the first 5 of 8" in out
    assert "\\x1b[2J" in out and "\x1b[2J" not in out, "nothing that a model wrote acts on the terminal"
    code, out, _ = command.ratchet("compare", "a", "b", "--at-least", "0", *store)
    assert code == 1
    assert out.endswith("--at-least 0: fails, the whole interval is below 0\n")
    code, out, _ = command.ratchet("compare", "a", "b", "--at-least", "-1.5", "--format", "json", *store)
    assert code == 0
    found = json.loads(out)
    assert (found["compares"], found["verdict"]) == ("policies", "B is worse")
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


# Settings


def side(folder: Path, name: str, *means: int, begin: int = 0, **changes: Any) -> list[Run]:
    """Runs of one setting, with seeds from `begin` on; run k solves the first `means[k]` of 16 prompts at the end."""
    return [
        made(
            folder,
            f"{name}{seed}",
            [[0] * 16, [1] * solved + [0] * (16 - solved)],
            [f"{number} + {number}" for number in range(16)],
            run__seed=seed,
            **changes,
        )
        for seed, solved in enumerate(means, begin)
    ]


def test_settings_are_compared_over_runs(tmp_path: Path) -> None:
    a, b = side(tmp_path, "a", 2, 3, 4), side(tmp_path, "b", 12, 13, 14, actor__lr=0.5)
    result = compare_settings(a, b)
    assert (result.compares, result.iteration, result.prompts, result.answers) == ("settings", 1, 16, 16)
    assert [(run.seed, run.score) for run in result.a] == [(0, 2 / 16), (1, 3 / 16), (2, 4 / 16)]
    assert result.difference == pytest.approx(10 / 16)
    assert [change.split()[0] for change in result.config] == ["actor.lr"]
    assert result.low is not None and result.high is not None and result.smallest is not None
    assert (result.verdict, result.unpaired, result.unknown) == ("B is better", 0, ())
    back = compare_settings(b, a)
    assert (back.low, back.high) == pytest.approx((-result.high, -result.low))
    assert [entry.iteration for entry in result.differences] == [0, 1]
    assert (result.differences[0].low, result.differences[0].high) == (0, 0)


def test_seeds_that_differ_as_much_as_the_sides_show_nothing(tmp_path: Path) -> None:
    a, b = side(tmp_path, "a", 2, 8), side(tmp_path, "b", 4, 12, actor__lr=0.5)
    result = compare_settings(a, b)
    assert (result.verdict, result.doubt) == ("cannot tell", "wide interval")
    policies = compare(a[0], b[1])
    assert policies.verdict == "B is better", "of two policies, which do differ"


def test_answers_that_a_run_lacks_are_left_out_of_all(tmp_path: Path) -> None:
    a, b = side(tmp_path, "a", 2, 3), side(tmp_path, "b", 12)
    b.append(made(tmp_path, "b-few", [[0] * 4, [1] * 4], [f"{number} + {number}" for number in range(4)], run__seed=1))
    result = compare_settings(a, b)
    assert result.prompts == 4
    assert result.unpaired == 2 * 3 * 12
    other = made(tmp_path, "c", [[0] * 4, [1] * 4], "wxyz", run__seed=2)
    with pytest.raises(UserError, match=r"a0, a1, b0 and c have no validation in common: set validation.data"):
        compare_settings(a, [b[0], other])


def test_runs_that_do_not_show_the_luck_of_a_setting_are_refused(tmp_path: Path) -> None:
    a, b = side(tmp_path, "a", 2, 3), side(tmp_path, "b", 4, 5)
    odd = side(tmp_path, "odd", 6, begin=7, actor__lr=0.5)
    again = side(tmp_path, "again", 4)
    code = side(tmp_path, "code", 6, begin=8, code="abcdef0123456789")
    for left, right, says in (
        (a, b[:1], r"side B has 1 run, whose luck .*: name two at least"),
        (a, [*b, *odd], r"b0 and odd7 of side B differ in more than run.seed \(actor.lr .* -> 0.5\): name runs of one"),
        (a, [*b, *again], r"b0 and again0 of side B have the same run.seed, 0: name runs with other seeds"),
        (a, [a[0], b[1]], r"/a0 is there twice: name each run once"),
        (a, [b[0], *code], r"b0 and code8 of side B were scored by other code of the reward"),
    ):
        with pytest.raises(UserError, match=says) as refused:
            compare_settings(left, right)
        assert len(str(refused.value).splitlines()) == 1


def test_settings_with_other_rewards_have_no_verdict(tmp_path: Path) -> None:
    a, b = side(tmp_path, "a", 2, 3), side(tmp_path, "b", 14, 15, reward__function="constant")
    result = compare_settings(a, b)
    assert (result.verdict, result.doubt) == ("cannot tell", "different rewards")
    assert result.falls_short(-9)


def test_luck_before_a_fork_is_not_seen(tmp_path: Path) -> None:
    [a] = side(tmp_path, "a", 4)
    children = []
    for child in ("b", "c", "d", "e"):
        config = a.config.with_values({"run.seed": ord(child), "run.name": child})
        claim = a.state.claim.model_copy(update={"config": config.model_dump(mode="json")})
        fork(a.store, RunStore.at(f"file://{tmp_path}/{child}").objects, claim.config, 1, [VALIDATE], "1")
        children.append(open_run(f"file://{tmp_path}/{child}"))
    result = compare_settings(children[:2], children[2:])
    assert result.unknown == tuple(
        f"runs of side {side} share everything up to 1: the interval covers only luck after it" for side in "AB"
    )


def test_the_command_compares_settings(command: Command) -> None:  # noqa: F811
    side(command.folder, "a", 2, 3, 4)
    side(command.folder, "b", 12, 13, 14, actor__lr=0.5)
    store = ("--store", f"file://{command.folder}")
    names = ("a0", "a1", "a2", "--", "b0", "b1", "b2")
    out = command("compare", *names)
    assert "A is a0 (seed 0, 0.125), a1 (seed 1, 0.188), a2 (seed 2, 0.250)\n" in out
    assert "their settings differ: actor.lr" in out
    assert "B is better: +0.625, 95 % interval" in out
    assert (
        "the luck of seeds, as 3 and 3 runs show it, and the noise of the prompts\nwith these runs an effect under"
        in out
    )
    code, out, _ = command.ratchet("compare", *names, *store, "--at-least", "2", "--format", "json")
    found = json.loads(out)
    assert (code, found["compares"], found["verdict"]) == (1, "settings", "B is better"), (
        "options may come after the --"
    )
    assert command.ratchet("compare", *store, "--at-least", "0", *names)[0] == 0
    assert "name two runs, or the runs of two settings with -- between them" in command.error(
        "compare", "a0", "a1", "b0"
    )
    assert "side B has 0 runs" in command.error("compare", "a0", "a1", "--")
