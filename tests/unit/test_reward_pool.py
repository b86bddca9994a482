"""Rewards in processes of their own: nothing that one of them does reaches another row, or outlives the pool."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.infra.execution.preflight.prompts import check_prompts
from ratchet.infra.progress import Event, Note, listening
from ratchet.rlhf.config import DataConfig, ModelConfig, RewardConfig
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.errors import NotFinite, UserError
from ratchet.rlhf.rewards.functions import RewardFailed, Score, Trajectory
from ratchet.rlhf.rewards.reward_processes import RewardPool, try_rewards
from tests import tiny
from tests.crash.test_two_drivers import wait_until
from tests.scoring import pool_of, trajectory, written

HOSTILE = "tests.rewards:hostile"


def row(response: str, truth: str = "") -> Trajectory:
    return trajectory("any", response, truth)


@pytest.fixture
def others() -> set[psutil.Process]:
    """Processes of runs that other tests have started in this one; their rewards' live on."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def pool(others: set[psutil.Process]) -> Iterator[RewardPool]:
    pool = pool_of({HOSTILE: 1.0}, workers=2, timeout_s=15.0)
    yield pool
    pool.close()


def sessions() -> set[int]:
    """Of the rewards' processes, and what they have started."""
    return {
        os.getsid(each.pid)
        for each in psutil.Process().children(recursive=True)
        if "ratchet.rlhf.rewards" in cmdline(each)
    }


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended; nobody may reap it where the first process of a container does not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_each_row_has_its_own_fate(others: set[psutil.Process], pool: RewardPool) -> None:
    asked = ["good", "raise", "print", "sleep", "good", "nan", "die", "text", "fork and sleep", "fork", "good"]
    found = dict(zip(asked, pool.score([row(each) for each in asked]), strict=True))
    for response in ("good", "print", "fork"):
        assert found[response] == Score(1.0, {})
    for response, kind, says in (
        ("raise", RewardFailed, "KeyError: 'no such thing'"),
        ("sleep", RewardFailed, "took longer than reward.timeout_s 15 s"),
        ("die", RewardFailed, "exit code 7"),
        ("fork and sleep", RewardFailed, "took longer"),
        ("nan", NotFinite, "is nan"),
        ("text", UserError, "return a number"),
    ):
        assert isinstance(found[response], kind)
        assert says in str(found[response])
    own = set(psutil.Process().children(recursive=True)) - others
    left = [process for process in own if "ratchet.rlhf.rewards" in cmdline(process)]
    assert len(left) > 1, "a child, and what it has forked"
    pool.close()
    wait_until(lambda: all(map(has_ended, left)))  # what a reward has forked ends with it


def test_who_is_forked_and_comes_back_answers_for_nobody(pool: RewardPool) -> None:
    for _ in range(3):
        found = pool.score([row(each) for each in ("fork and return", "raise", "good", "fork and return", "good")])
        assert [isinstance(one, Score) and one.score for one in found] == [1.0, False, 1.0, 1.0, 1.0]


def test_what_leaves_the_session_ends_too(pool: RewardPool) -> None:
    assert pool.score([row("daemon")]) == [Score(1.0, {})]
    daemons: list[psutil.Process] = []

    def is_there() -> bool:  # as soon as what was forked has become another program
        daemons[:] = [each for each in psutil.Process().children(recursive=True) if cmdline(each) == "sleep 3600"]
        return bool(daemons)

    wait_until(is_there)
    [daemon] = daemons
    pool.close()
    wait_until(lambda: has_ended(daemon))


def test_a_child_that_died_meanwhile_is_begun_anew(pool: RewardPool) -> None:
    assert pool.score([row("good")]) == [Score(1.0, {})]
    [child] = [each for each in psutil.Process().children() if "ratchet.rlhf.rewards" in cmdline(each)]
    child.kill()
    child.wait()
    assert pool.score([row("good")] * 2) == [Score(1.0, {})] * 2


def test_many_rows_are_shared_and_keep_their_order(pool: RewardPool) -> None:
    """By more children when rows take their time; for quick ones, one is enough."""
    asked = [row("raise" if number % 7 == 3 else "good") for number in range(100)]
    for seconds_a_row, children in ((0.0, 1), (0.1, 2)):
        if seconds_a_row:
            pool.score([row("nap")] * 4)
        found = pool.score(asked)
        assert [isinstance(one, Score) for one in found] == [number % 7 != 3 for number in range(100)]
        assert len(sessions()) == children


def test_stages_that_overlap_do_not_get_each_others_scores(pool: RewardPool) -> None:
    asked = [row("good"), row("raise")] * 20
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: pool.score(asked), range(20)))
    assert all([isinstance(one, Score) for one in each] == [True, False] * 20 for each in found)


def test_several_rewards_are_weighed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def half(data_source, solution_str, ground_truth, extra_info=None, factor=1):\n"
        "    return {'score': factor / 2, 'a': 1}\n"
    )
    mine = f"{file}:half"
    pool = pool_of({"gsm8k": 1.0, mine: 0.5}, {mine: {"factor": 3}, "gsm8k": {"method": "strict"}})
    right, wrong = pool.score([row("#### 42", truth="42"), row("it is 42", truth="42")])
    pool.close()
    assert right == Score(1.75, {"gsm8k": 1.0, "gsm8k/format": 1.0, mine: 1.5, f"{mine}/a": 1.0})
    assert isinstance(wrong, Score)
    assert wrong.score == 0.75


def test_a_reward_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    pool = pool_of({"no_such_module:f": 1.0})
    with pytest.raises(RewardFailed, match="No module named 'no_such_module'"):
        pool.score([row("x")])


def test_a_reward_is_tried_on_each_file(tmp_path: Path) -> None:
    """Held-out prompts too, though their data source is that of the others."""
    for name, truth in (("train", {"target": 3, "numbers": [1, 2]}), ("held_out", "three")):
        row = {"data_source": "countdown", "prompt": [{"role": "user", "content": "3 from 1 and 2"}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | {"reward_model": {"ground_truth": truth}}) + "\n")
    prompts = list(PromptDataset([str(tmp_path / "train.jsonl"), str(tmp_path / "held_out.jsonl")]))
    [failure] = try_rewards(RewardConfig(function="countdown"), prompts, written)
    assert f"{tmp_path}/held_out.jsonl, line 1" in failure


@pytest.mark.parametrize(
    ("code", "fails_on"),
    [
        ("return float(solution_str)", ("an empty answer", "ValueError: could not convert string to float: ''")),
        ("return 1 / (len(solution_str) < 9999)", ("a long answer", "ZeroDivisionError")),
        ("return len(solution_str.encode('ascii'))", ("a random answer", "UnicodeEncodeError")),
        ("return len(solution_str)", None),
    ],
)
@pytest.mark.parametrize("takes_group", [False, True])
def test_a_reward_is_tried_on_what_a_policy_may_write(
    tmp_path: Path, code: str, fails_on: tuple[str, str] | None, takes_group: bool
) -> None:
    """A line for each error, and the answers other than the truth for the first prompt of a data source."""
    file = tmp_path / "mine.py"
    one = f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {code}\n"
    several = "def compute_scores(group):\n    return [one(None, answer.solution_str, None) for answer in group]\n"
    file.write_text(one.replace("compute_score", "one") + several if takes_group else one)
    row = {"data_source": "sums", "prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "sums.jsonl").write_text(2 * f"{json.dumps(row)}\n")
    row |= {"data_source": "others", "reward_model": {"ground_truth": "3"}}
    (tmp_path / "others.jsonl").write_text(f"{json.dumps(row)}\n")
    prompts = list(PromptDataset([str(tmp_path / "sums.jsonl"), str(tmp_path / "others.jsonl")]))
    failures = list(try_rewards(RewardConfig(function=str(file)), prompts, written))
    if fails_on is None:
        assert not failures
        return
    [failure] = failures
    answer, error = fails_on
    assert failure.startswith(f"{tmp_path}/sums.jsonl, line 1: reward.function {file} cannot score {answer} to this")
    assert error in failure
    assert "at mine.py:2 in" in failure
    assert "\n" not in failure


@pytest.mark.parametrize(
    ("function", "bad", "good"),
    [
        ("gsm8k", "a dozen", ["2", "3"]),
        ("math", "\\boxed{}", ["2", "3"]),
        ("auto", "", ["2"]),
        ("gsm8k", "a dozen", []),
    ],
)
def test_a_truth_that_no_response_can_have_is_found_in_any_row(
    tmp_path: Path, function: str, bad: str, good: list[str]
) -> None:
    model, file = tiny.model_folder(tmp_path / "model"), tmp_path / "gsm8k.jsonl"
    rows = [{"prompt": "1 + 1?", "answer": truth} for truth in (*good, bad, bad)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataConfig(train=(str(file),), prompts_per_iteration=1)
    with pytest.raises(UserError) as refused:
        check_prompts(
            PromptDataset([str(file)]), ModelConfig(path=str(model)), data, RewardConfig(function=function), None
        )
    first = f"{file}, line {len(good) + 1}"
    assert str(refused.value).startswith(f"{first}: reward.function {function} cannot score an answer to this")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("function", "missing", "is_noted"),
    [
        ({"format": 0.5}, "", False),
        ("format", "<", True),
        ({"gsm8k": 0.5, "format": 0.5}, "<", True),
        ("gsm8k", "<", False),
    ],
)
def test_a_built_in_is_tried_on_a_right_answer(tmp_path: Path, function: Any, missing: str, is_noted: bool) -> None:
    """After what the chat template opens, and through the tokenizer, which may not have what it needs."""
    file, template = tmp_path / "sums.jsonl", tmp_path / "chat.jinja"
    model = tiny.model_folder(tmp_path / "model", letters=tiny.LETTERS.replace(missing, ""))
    template.write_text("{{ messages[-1].content }}{% if add_generation_prompt %}<think>{% endif %}")
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}) + "\n")
    notes: list[Any] = []
    with listening(notes.append):
        check_prompts(
            PromptDataset([str(file)]),
            ModelConfig(path=str(model), chat_template=str(template)),
            DataConfig(train=(str(file),), prompts_per_iteration=1),
            RewardConfig(function=function),
            None,
        )
    found = [note.text for note in notes]
    assert bool(found) == is_noted
    assert all(f"{file}, line 1: reward.function format gives 0 to the right answer" in text for text in found)


def test_a_bug_in_a_reward_is_one_line_and_what_it_says_to_do_works(tmp_path: Path) -> None:
    file, model = tmp_path / "mine.py", tmp_path / "model"
    code = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return extra_info['key']\n"
    )
    file.write_text(code)
    tiny.model_folder(model)
    for name, truth in (("train", "2"), ("test", "3")):
        prompt = {"data_source": "sums", "prompt": "1 + 1?", "reward_model": {"ground_truth": truth}}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(prompt)}\n")
    dataset = PromptDataset([str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")])

    def check(**reward: Any) -> None:
        data = DataConfig(train=["train.jsonl"])
        check_prompts(dataset, ModelConfig(path=str(model)), data, RewardConfig(function=str(file), **reward), None)

    with pytest.raises(UserError) as refused:
        check()
    assert str(refused.value).startswith(f"{tmp_path}/train.jsonl, line 1: ")
    assert "\n" not in str(refused.value)
    assert ": return a score for such answers, or set reward.on_error=zero" in str(refused.value)
    noted: list[Event] = []
    with listening(noted.append):
        check(on_error="zero")
    [note] = noted
    assert isinstance(note, Note)
    assert note.text.endswith(": return a score for such answers"), "for it is zero already"
    file.write_text(code.replace("['key']", ".get('key', 0)"))
    check()
