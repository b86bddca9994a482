"""SQL in child processes, and the page's filters: what one may use, who waits for it, and when it ends."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.flows.ui.server import AT_ONCE, LIMITS
from ratchet.infra.runs.query import query
from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.sql import DataFile, FileTable, Statement, Tables
from ratchet.infra.runs.statements import SQLLimits, StatementFailed, Statements
from ratchet.rlhf.errors import UserError
from tests.browser import served
from tests.stored import STORED
from tests.tiers import sampled

STORE = f"file://{STORED}"
"""A folder with a run of 16 trajectories."""
LARGE = "len(range(400000000)) > 0"
"""Asks for gigabytes in one vector, at whose end DuckDB would look at its limits."""
SLOW = "levenshtein(repeat('a', 1000000), repeat('b', 1000000)) > 0"
"""Takes an hour within one vector."""


def processes() -> list[psutil.Process]:
    """Those of this test that run statements."""
    found = []
    for child in psutil.Process().children():
        if child.status() != psutil.STATUS_ZOMBIE and "ratchet.infra.runs.sql_process" in child.cmdline():
            found.append(child)
    return found


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    for process in processes():
        process.kill()


def ask(url: str, path: str, **parameters: str) -> tuple[int, Any, str | None]:
    """Status, JSON, and when to come again."""
    try:
        with urllib.request.urlopen(f"{url}api/{path}?{urllib.parse.urlencode(parameters)}") as answer:
            return answer.status, json.load(answer), None
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers["Retry-After"]


@sampled(2)
@pytest.mark.parametrize(
    ("condition", "limits", "said"),
    [
        (LARGE, SQLLimits(600.0, 2**29, 2), "it needs more than 0.5 GiB of memory"),
        (SLOW, SQLLimits(0.5, 2**31, 2), "it took longer than 0.5 s"),
    ],
)
def test_a_filter_that_is_too_much_ends_in_one_line(condition: str, limits: SQLLimits, said: str) -> None:
    with served(STORE, limits) as url:
        status, answer, _ = ask(url, "trajectories", run="run", where=condition)
        assert (status, answer["error"]) == (
            400,
            f"the filter is too much: {said}; choose one iteration, or a simpler condition",
        )
        for _ in range(100):  # half a second may be too short for any filter on a busy machine
            status, answer, _ = ask(url, "trajectories", run="run", where="sample = 0", iteration="0")
            if status == 200:
                break
        assert (status, answer["matching"], answer["total"]) == (200, 4, 8)
    with served(STORE) as url:
        status, answer, _ = ask(url, "trajectories", run="run", where="scor > 1")
        assert status == 400
        assert answer["error"].startswith(
            "where 'scor > 1': Binder Error: Referenced column \"scor\" not found in FROM "
        )
        assert "; columns are run, iteration, trajectory_id, prompt_id, " in answer["error"]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (
            "true) UNION ALL SELECT repeat('x', 1000000), 0, 'p', 1.0, 1, 'stop', 'r', 1 FROM range(1) WHERE (true",
            400,
        ),
        ("true) UNION ALL SELECT * REPLACE (repeat('x', 1000000) AS prompt_id) FROM trajectories WHERE (true", 200),
        ("error(repeat('x', 1000000))", 400),
    ],
)
def test_no_filter_makes_a_large_answer(condition: str, expected: int) -> None:
    """It would fill the memory of the page's own process."""
    with served(STORE) as url:
        status, answer, _ = ask(url, "trajectories", run="run", where=condition)
        assert status == expected
        assert len(json.dumps(answer)) < 50_000
        status, answer, _ = ask(url, "trajectories", run="run", where="sample = 0 -- a comment", low="-1", text="a")
        assert status == 200


def test_the_page_answers_beside_slow_filters_which_end_with_their_clients() -> None:
    with served(STORE, SQLLimits(3600.0, 2**31, 1)) as url:
        clients = []
        for _ in range(AT_ONCE):
            client = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc)
            client.request("GET", f"/api/trajectories?{urllib.parse.urlencode({'run': 'run', 'where': SLOW})}")
            clients.append(client)
        while len(running := processes()) < AT_ONCE:
            pass
        assert ask(url, "run", run="run")[:1] == ask(url, "runs")[:1] == (200,)
        for path, more in (
            ("trajectories", {"order": "best"}),
            ("trajectory", {"iteration": "0", "id": "it000000-p00000-s00"}),
        ):
            status, answer, later = ask(url, path, run="run", **more)
            assert (status, answer, later) == (503, {"error": "4 filters are running: try again in a moment"}, "1")
        for client in clients:
            client.close()
        psutil.wait_procs(running)
        while (answered := ask(url, "trajectories", run="run"))[0] == 503:
            pass
        assert (answered[0], answered[1]["total"]) == (200, 16)


def test_a_query_has_limits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(f"{STORE}/run")
    assert query(run, "select count(*) as n from trajectories").to_dict("list") == {"n": [16]}
    for condition, limits, said in (
        (SLOW, SQLLimits(0.5, 2**29, 1), "it took longer than 0.5 s"),
        (LARGE, SQLLimits(600.0, 2**29, 1), "it needs more than 0.5 GiB of memory"),
    ):
        monkeypatch.setattr("ratchet.infra.runs.query._statements", Statements(limits))
        with pytest.raises(
            UserError, match=f"^query: {said}; choose fewer iterations or columns; tables are advantages"
        ):
            query(run, f"select {condition}")


def test_a_process_answers_as_long_as_it_is_as_good_as_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Tables(rows={"rows": pa.table({"a": [1, None]})})
    statements = Statements(LIMITS)
    pids: list[int] = []

    def answer(sql: str) -> Any:
        with statements.child() as child:
            pids.extend(process.pid for process in processes())
            return child.ask(rows, Statement(sql, {"least": 0.0} if "$least" in sql else {}))[0].to_dict("list")

    assert answer("select a from rows where a > $least") == {"a": [1]}
    for wrong, kind in (("selec", "syntax"), ("select b from rows", "refused"), ("select 1; select 2", "refused")):
        with pytest.raises(StatementFailed) as failed:
            answer(wrong)
        assert failed.value.kind == kind
    assert answer("select count(*) as n from rows") == {"n": [2]}
    assert len(set(pids)) == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere")
    assert answer("select 1 as b") == {"b": [1]}
    [newest] = processes()
    newest.kill()
    newest.wait()
    assert answer("select 2 as b") == {"b": [2]}
    assert len(set(pids)) == 3
    statements.close()


def test_a_process_ends_with_its_parent() -> None:
    program = (
        "import psutil; from ratchet.infra.runs.statements import *; from ratchet.infra.runs.sql import *\n"
        "with Statements(SQLLimits(3600.0, 2**30, 1)).child() as child:\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        f'    child.ask(Tables(), Statement("select {SLOW}"))'
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    child.wait()
    parent.stdout.close()


def test_no_statement_reads_what_lies_outside_its_runs_folder(tmp_path: Path) -> None:
    (tmp_path / "run" / "folder").mkdir(parents=True)
    table = pa.table({"a": [1]})
    for place in ("victim.parquet", "run/folder/mine.parquet"):
        pq.write_table(table, tmp_path / place)
    (tmp_path / "run" / "link").symlink_to(tmp_path)
    (tmp_path / "run" / "link.parquet").symlink_to(tmp_path / "victim.parquet")
    statements = Statements(LIMITS)
    with statements.child() as child:
        for key in ("../victim.parquet", "link/victim.parquet", "link.parquet", str(tmp_path / "victim.parquet")):
            with pytest.raises(StatementFailed) as failed:
                child.ask(of_file(tmp_path, key, table), Statement("select * from rows"))
            assert failed.value.kind == "unreadable"
        [frame] = child.ask(of_file(tmp_path, "folder/mine.parquet", table), Statement("select * from rows"))
        assert frame.to_dict("list") == {"a": [1]}
    statements.close()


def of_file(folder: Path, key: str, table: pa.Table) -> Tables:
    return Tables((FileTable("rows", table.schema, (DataFile(f"file://{folder}/run", key, sha256=""),)),))
