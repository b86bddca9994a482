"""Reading a run in Python: a small one that an earlier release stored, opened where it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ratchet
from infra.runs import Run, no_run, open_run
from rlhf.errors import UserError, counted

ROOT = Path(__file__).parents[2]
STORE = ROOT / "tests" / "data" / "stored" / "schema-3"


@pytest.fixture(scope="module")
def run() -> Run:
    return open_run(f"file://{STORE}/run")


def test_a_run_that_does_not_exist_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run at file://.*/rum: is it run\?$"):
        open_run(f"file://{STORE}/rum")
    with pytest.raises(UserError, match=r"check the name, and the store file://.*schema-3 .*`ratchet ls`"):
        open_run(f"file://{STORE}/countdown")
    (tmp_path / "runs" / "countdown").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no run at contdown: give its folder, such as file://\./runs/countdown$"):
        open_run("contdown")
    assert "check the name" in str(no_run("nowhere://store/run"))  # the store cannot be listed


def test_a_run_tells_what_it_is(run: Run) -> None:
    assert repr(run) == f"Run('file://{STORE}/run', 1 of 3 iterations)"


def test_iterations_are_given_as_a_number_or_several(run: Run) -> None:
    one = run.trajectories(iterations=1, columns=["score"])
    assert one.equals(run.trajectories([1], ["score"]))
    assert len(run.trajectories(range(2))) == len(run.trajectories())
    for missing in (7, [0, 7], [-1]):
        with pytest.raises(UserError, match=r"no iteration -?\d: the run has iterations 0 to 1 \(1 is open\)"):
            run.trajectories(missing)


def test_a_query_names_what_is_near(run: Run) -> None:
    assert run.query("select count(*) as n from trajectories")["n"][0] == len(run.trajectories())
    for sql, says in (
        ("select scor from trajectories", 'Nearest columns: "score"'),
        ("select score from trajectorie", 'Did you mean "trajectories"?'),
        ("run", "write SQL, such as `select"),
    ):
        with pytest.raises(UserError) as refused:
            run.query(sql)
        assert says in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"'run' is a text, not a run: query\(open_run\(URL\), SQL\)"):
        ratchet.query("run", "select 1")


def test_the_module_lists_its_names() -> None:
    assert dir(ratchet) == sorted([*ratchet.__all__, "__version__"])
    command = [sys.executable, "-c", "import ratchet; print(ratchet.__version__)"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert printed.strip() == str(ratchet.__version__)
    assert printed[0].isdigit()


def test_numbers_have_their_nouns() -> None:
    assert [counted(number, "iteration") for number in (0, 1, 2)] == ["0 iterations", "1 iteration", "2 iterations"]
