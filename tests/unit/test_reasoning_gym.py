"""Problems of reasoning-gym: stored as a dataset, and scored by the package's own scorers."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ratchet.flows.commands.app import app
from ratchet.rlhf.convert.datasets import REASONING_GYM
from ratchet.rlhf.convert.datasets import reasoning_gym as made
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rewards.auto import compute_score
from ratchet.rlhf.rewards.reasoning_gym import EVALUATING
from tests.extras import needs

GENERATES = {"basic_arithmetic", "gsm_symbolic", "codeio", "bf"}
"""Their modules run Python of the package, to make problems; they score texts."""
PARSES = {"propositional_logic"}
"""Its `parse_expr` is a parser of its own."""


@needs("reasoning-gym")
def test_the_scores_are_those_of_the_package(tmp_path: Path) -> None:
    import reasoning_gym

    arguments = ["data", "reasoning-gym", "letter_counting", str(tmp_path / "in" / "letters.parquet")]
    done = CliRunner().invoke(app, [*arguments, "max_words=6", "--size", "4", "--seed", "3"])
    assert done.exit_code == 0, done.output
    rows = pq.read_table(tmp_path / "in" / "letters.parquet").to_pylist()
    dataset = reasoning_gym.create_dataset("letter_counting", seed=3, size=4, max_words=6)
    assert len(rows) == 4
    for row, problem in zip(rows, dataset, strict=True):
        assert row["prompt"] == [{"role": "user", "content": f"{problem['question']}\n{REASONING_GYM}"}]
        right = problem["answer"]

        def score(response: str, row: dict[str, object] = row, right: str = right) -> float:
            return compute_score(row["data_source"], response, right, row["extra_info"])

        assert score(f"<answer>99</answer>, no: <answer> {right} </answer>.") == 1.0
        assert score(right) == 1.0, "without a mark all is the answer"
        assert score("<answer>-1</answer>") == dataset.score_answer("-1", problem) < 1.0
        assert score("") == dataset.score_answer("", problem)


@needs("reasoning-gym")
def test_a_scorer_that_fails_on_an_answer_gives_nothing() -> None:
    [row] = made("prime_factorization", {}, 1, 0).to_pylist()
    assert compute_score(row["data_source"], "<answer>two × x</answer>", "", row["extra_info"]) == 0.0
    truth = row["reward_model"]["ground_truth"]
    assert compute_score(row["data_source"], f"<answer>{truth}</answer>", "", row["extra_info"]) == 1.0


@needs("reasoning-gym")
@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        ("no_such", {}, "'no_such' not registered"),
        ("leg_counting", {"heads": 2}, "unexpected keyword argument 'heads'"),
        ("arc_agi", {}, "is scored differently: choose another dataset"),
        ("countdown", {}, "would run answers to countdown as Python: choose another dataset"),
    ],
)
def test_what_cannot_be_used_is_refused(dataset: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=rf"^reasoning-gym {dataset}: .*{says}") as refused:
        made(dataset, options, 2, 0)
    assert "\n" not in str(refused.value)


@needs("reasoning-gym")
def test_no_answer_is_run_as_python(tmp_path: Path) -> None:
    from reasoning_gym.factory import DATASETS

    problem = {"question": "", "answer": "6", "metadata": {"source_dataset": "puzzle24", "numbers": [1, 1, 1, 6]}}
    leaves = f"<answer>open({str(tmp_path / 'ran')!r}, 'w').close()</answer>"
    with pytest.raises(ValueError, match="would run answers to puzzle24 as Python"):
        compute_score("reasoning_gym/puzzle24", leaves, "6", {"reasoning_gym": json.dumps(problem)})
    assert not (tmp_path / "ran").exists()
    runs = re.compile(r"(?<![.\w])(eval|exec|parse_expr|sympify)\(|\.(parse_expr|sympify)\(|pickle|subprocess")
    modules = {name: inspect.getmodule(kind) for name, (kind, _) in DATASETS.items()}
    found = {name for name, module in modules.items() if module is not None and runs.search(inspect.getsource(module))}
    assert found - GENERATES - PARSES == EVALUATING
