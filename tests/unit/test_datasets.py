"""Prompt files from what others publish, and what prompts become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ratchet.rlhf.built_in_rewards import solved_score
from ratchet.rlhf.config import ModelConfig, parse_config
from ratchet.rlhf.convert import datasets
from ratchet.rlhf.data import files
from ratchet.rlhf.data.prompts import PromptDataset, encode
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.rewards import auto
from ratchet.rlhf.validation import final_answer, means, sums
from tests import tiny
from tests.tiers import sampled

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k"


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def test_gsm8k_becomes_prompts_whose_own_solutions_are_right(tmp_path: Path) -> None:
    table = datasets.gsm8k(files.read(str(GSM8K / "train.jsonl")), "train")
    pq.write_table(table, path := tmp_path / "train.parquet")
    dataset = PromptDataset([path])
    assert len(dataset) == 300
    first = dataset[0]
    assert first.messages[0]["content"].startswith("Natalia sold clips to 48 of her friends")
    assert first.messages[0]["content"].endswith('after "####".')
    for prompt in dataset:
        extra = json.loads(prompt.extra_info)
        assert auto.compute_score(prompt.data_source, extra["answer"], prompt.ground_truth, extra)["score"] == 1.0


def test_mathematics_from_solutions_and_answers(tmp_path: Path) -> None:
    rows = [
        {"problem": "Half of one?", "solution": "It is $\\boxed{\\frac{1}{2}}$."},
        {"problem": "One and one?", "answer": "2"},
    ]
    table = datasets.math(files.read(lines(tmp_path / "train.jsonl", *rows)), "train")
    assert [row["ground_truth"] for row in table["reward_model"].to_pylist()] == ["\\frac{1}{2}", "2"]
    assert auto.compute_score("lighteval/MATH", "\\boxed{0.5}", "\\frac{1}{2}") == 1.0


def test_any_table_of_prompts(tmp_path: Path) -> None:
    rows = files.read(lines(tmp_path / "t.jsonl", {"q": "Why?", "a": 42}, {"q": "How?", "a": 43}))
    table = datasets.prompts(rows, "train", prompt="q", truth="a", data_source="mine", instruction="Be brief.")
    assert table["prompt"].to_pylist()[0] == [{"role": "user", "content": "Why? Be brief."}]
    assert table["reward_model"].to_pylist()[1] == {"style": "rule", "ground_truth": "43"}


def test_what_the_reward_compares_with_may_be_a_structure(tmp_path: Path) -> None:
    tests = {"inputs": ["1"], "outputs": ["é"]}
    rows = files.read(lines(tmp_path / "t.jsonl", {"q": "Why?", "a": tests}, {"q": "How?", "a": None}))
    with pytest.raises(UserError, match="line 2: a of this row is empty: fill it in, or remove the row"):
        datasets.prompts(rows, "train", prompt="q", truth="a", data_source="mine", instruction=None)
    rows = files.read(lines(tmp_path / "t.jsonl", {"q": "Why?", "a": tests}))
    table = datasets.prompts(rows, "train", prompt="q", truth="a", data_source="mine", instruction=None)
    assert json.loads(table["reward_model"].to_pylist()[0]["ground_truth"]) == tests


def test_tools_stay_with_their_prompts(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    rows = files.read(lines(tmp_path / "t.jsonl", {"q": "When?", "tools": tools}, {"q": "Why?"}))
    table = datasets.prompts(rows, "train", prompt="q", truth=None, data_source="mine", instruction=None)
    pq.write_table(table, tmp_path / "t.parquet")
    assert [list(prompt.tools) for prompt in PromptDataset([tmp_path / "t.parquet"])] == [tools, []]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (['{"question": "q", "answer": "#### 1"}', '{"question": '], "line 2 is not JSON"),
        (["[1]"], "line 1 is not a JSON object"),
        ([{"question": "q"}], "line 1: there is no answer; there are question"),
        ([{"question": " ", "answer": "#### 1"}], "line 1: question of this row is empty"),
        ([{"question": 1, "answer": "#### 1"}], "line 1: question is not a text"),
        ([{"question": "q", "answer": "one"}], "line 1: the answer does not end with ####"),
        ([{"question": "q", "answer": "#### 1", "image": "a.png"}], "line 1 has image, and prompt files that"),
        ([], "there are no rows"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(tmp_path: Path, rows: list[Any], says: str) -> None:
    with pytest.raises(UserError, match=says.replace("[", r"\[")):
        datasets.gsm8k(files.read(lines(tmp_path / "train.jsonl", *rows)), "train")


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        list(files.read(str(tmp_path / "none.jsonl")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.model_folder(folder)
    return load_tokenizer(ModelConfig(path=str(folder)))


def prompts(path: Path, *contents: str) -> PromptDataset:
    rows = [{"data_source": "s", "prompt": content, "reward_model": {"ground_truth": "1"}} for content in contents]
    return PromptDataset([lines(path / "prompts.jsonl", *rows)])


@pytest.mark.parametrize(("truncation", "kept"), [("left", "6789"), ("right", "0123"), ("middle", "0189")])
def test_longer_prompts_are_cut(tokenizer: Any, tmp_path: Path, truncation: str, kept: str) -> None:
    [prompt] = prompts(tmp_path, "0123456789")
    text, ids = encode(prompt, tokenizer, max_tokens=4, truncation=truncation)
    assert (text, tokenizer.decode(ids)) == ("0123456789", kept)
    with pytest.raises(UserError, match=r"has 10 tokens, more than data\.max_prompt_tokens 4"):
        encode(prompt, tokenizer, max_tokens=4, truncation="error")


def test_longer_prompts_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    dataset = prompts(tmp_path, "012", "0123456789", "45")
    kept = dataset.without_overlong(tokenizer, 4, None)
    assert [each.messages[0]["content"] for each in kept] == ["012", "45"]
    assert (len(dataset), kept.digest) == (3, dataset.digest)
    assert sorted(kept.draw(0, 0, 4)) == [0, 0, 1, 1]
    with pytest.raises(UserError, match="every prompt has more"):
        dataset.without_overlong(tokenizer, 1, None)


def test_a_system_prompt_stands_before_prompts_that_have_none(tokenizer: Any, tmp_path: Path) -> None:
    [prompt] = prompts(tmp_path, "Why?")
    text, _ = encode(prompt, tokenizer, max_tokens=99, truncation="error", system_prompt="Be brief.")
    assert text == "Be brief.\nWhy?"
    own = {
        "data_source": "s",
        "prompt": [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Why?"}],
    }
    [prompt] = PromptDataset([lines(tmp_path / "own.jsonl", own)])
    text, _ = encode(prompt, tokenizer, max_tokens=99, truncation="error", system_prompt="Be brief.")
    assert text == "Be long.\nWhy?"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so <answer> 4 2 </answer> or <answer>43</answer>", "43"),
        ("\\boxed{1} and \\boxed{2}, I think", "\\boxed{2}"),
        ("#### 41\nno\n#### 4 2", "42"),
        ("first\nthe last line", "thelastline"),
        ("<answer>1</answer> that is all</answer>", "1"),
        ("<answer>1</answer> or <answer>2", "1"),
        ("", ""),
    ],
)
def test_what_a_response_comes_to(response: str, answer: str) -> None:
    assert final_answer(response) == answer


def test_metrics_of_several_answers_by_hand() -> None:
    """Two prompts of one source with three answers each, in two shards; another source with one."""
    first = sums(["a"] * 3, ["p0"] * 3, ["#### 1", "#### 2", "#### 2"], [1.0, 0.0, 0.0], 3, 1.0)
    second = sums(
        ["a"] * 3 + ["b"], ["p1"] * 3 + ["p2"], ["#### 5", "#### 6", "#### 5", "x"], [1.0, 0.0, 1.0, 0.5], 3, 1.0
    )
    found = means([first, second])
    assert found["a"] == {
        "mean_score": pytest.approx(0.5),
        "pass@1": pytest.approx(0.5),
        "maj@3": pytest.approx(0.5),
        "best@3": pytest.approx(1.0),
        # the prompts' means are 1/3 and 2/3
        "mean_score_stderr": pytest.approx(1 / 6),
        "pass@1_stderr": pytest.approx(1 / 6),
    }
    assert found["b"] == {"mean_score": 0.5, "pass@1": 0.0}, "one prompt has no standard error"


@sampled(3)
@pytest.mark.parametrize(("prompts", "skill", "covered"), [(64, 0.5, 0.945), (64, 0.9, 0.93), (64, 0.97, 0.87)])
def test_two_standard_errors_around_a_mean_hold_the_rate_of_the_policy(
    prompts: int, skill: float, covered: float
) -> None:
    """As the page draws them, over the draw of the prompts, with four answers each that are not independent. Near 0 and
    1, few prompts hold it less often: docs/ui.md says so."""
    random, trials, held = np.random.default_rng(0), 1000, 0
    for _ in range(trials):
        rates = random.beta(2 * skill, 2 * (1 - skill), prompts)
        scores = (random.random((prompts, 4)) < rates[:, None]).astype(float)
        names = [f"p{prompt}" for prompt in range(prompts) for _ in range(4)]
        found = means([sums(["a"] * len(names), names, [""] * len(names), scores.ravel().tolist(), 4)])["a"]
        held += abs(found["mean_score"] - skill) <= 2 * found["mean_score_stderr"]
    noise = 3 * (covered * (1 - covered) / trials) ** 0.5
    assert held / trials == pytest.approx(covered, abs=noise)


def test_from_which_score_on_an_answer_is_solved_is_named_or_there_is_no_pass_at_1() -> None:
    answers = (["a"] * 4, ["p0", "p1", "p2", "p3"], [""] * 4, [-1.5, 0.2, 0.7, 3.0])
    assert set(means([sums(*answers, 1)])["a"]) == {"mean_score", "mean_score_stderr"}
    assert means([sums(*answers, 1, 0.5)])["a"]["pass@1"] == 0.5
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "p"}}
    for reward, rollout, solved in (
        ({"function": "gsm8k"}, {}, 1.0),
        ({"function": "auto"}, {}, 1.0),
        ({"function": "my_rewards:compute_score"}, {}, None),
        ({"function": "length"}, {}, None),
        ({"function": {"gsm8k": 1.0, "format": 0.2}}, {}, None),
        ({"model": "judge"}, {}, None),
        ({"model": "judge", "function": "gsm8k"}, {}, None),
        ({"function": "gsm8k"}, {"environment": "calculator"}, None),
    ):
        config = parse_config(tree | {"reward": reward, "rollout": rollout}, "here")
        alone = config.reward.model is None and config.rollout.environment is None
        assert solved_score(None, config.reward.function, alone=alone) == solved, reward
        assert solved_score(0.25, config.reward.function, alone=alone) == 0.25
