"""Programs of the model: what passes, and what one that means harm comes to."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.rlhf.config import RewardConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rewards.code import compute_score
from ratchet.rlhf.rewards.functions import Score
from ratchet.rlhf.rewards.registry import check_rewards
from tests.crash.test_two_drivers import wait_until
from tests.extras import needs
from tests.scoring import pool_of, trajectory
from tests.tiers import sampled
from tests.unit.test_reward_pool import has_ended

SUM = json.dumps({"inputs": ["1 2\n", "10 -3\n"], "outputs": ["3\n", "7"]})
SANDBOXES = ["limits", pytest.param("bubblewrap", marks=needs("bubblewrap"))]


def score(program: str, truth: Any = SUM, sandbox: Any = "limits", seconds: float = 10) -> dict[str, float]:
    return compute_score("code", f"So:\n```python\n{program}\n```\n", truth, seconds=seconds, sandbox=sandbox)


KILL = """
import contextlib, os
def kill(process):
    with contextlib.suppress(OSError):
        if process != os.getpid():
            os.kill(process, 9)
"""


@pytest.fixture(params=SANDBOXES)
def sandbox(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_programs_are_tried(sandbox: str) -> None:
    assert score("print(sum(map(int, input().split())))", sandbox=sandbox) == {"score": 1.0, "passed": 1.0}
    assert score("print(3)", sandbox=sandbox) == {"score": 0.0, "passed": 0.5}
    asserts = json.dumps({"asserts": "assert double(2) == 4"})
    assert score("def double(x): return 2 * x", asserts, sandbox=sandbox)["score"] == 1.0
    assert score("def double(x): return x", asserts, sandbox=sandbox)["score"] == 0.0
    assert compute_score("code", "no program", SUM, sandbox="limits")["score"] == 0.0  # type: ignore[arg-type]


ADD = "print(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    "response",
    [
        f"```Python\n{ADD}\n```",
        f"```python3 title=x\n{ADD}\n```",
        f"```py\r\n{ADD}\r\n```",
        f"```\n{ADD}\n```",
        f"Of\n```text\n1 2\n```\ncomes\n```python\n{ADD}\n```",
        f"Not\n```cpp\nint x;\n```\nbut\n```\n{ADD}\n```",
        f"```python\nprint(0)\n```\nno:\n```python\n{ADD}\n```\nwhich says\n```\n3\n```\nwith\n```sh\npython a\n```",
        f"Here: ```python\n{ADD}\n```",
        f"Call ```solve()``` as\n\n```python\n{ADD}\n```",
        f"The ``` fence:\n```python\n{ADD}\n```",
        f"1. this\n   ```python\n   n = input().split()\n   {ADD.replace('input().split()', 'n')}\n   ```",
    ],
)
def test_the_last_block_of_python_is_the_program(response: str) -> None:
    assert compute_score("code", response, SUM, sandbox="limits")["score"] == 1.0


@pytest.mark.parametrize(
    ("truth", "right"),
    [
        ({"asserts": ["assert double(2) == 4", "assert double(0) == 0"]}, True),
        ({"asserts": ["assert double(2) == 4", "assert False"]}, False),
    ],
)
def test_what_is_tested_may_be_a_list_and_a_structure(truth: dict[str, Any], right: bool) -> None:
    for given in (truth, json.dumps(truth)):
        assert score("def double(x): return 2 * x", given)["score"] == right


@pytest.mark.parametrize(
    "truth",
    [
        {"asserts": ""},
        {"asserts": []},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": ["1", "2"]},
        {"inputs": "1 2", "outputs": "3"},
        {"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "add"},
        ["assert True"],
        None,
    ],
)
def test_a_truth_that_tests_nothing_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"neither `inputs` with as many `outputs` nor `asserts`|written as `asserts`"):
        score("print(3)", truth)


def test_a_table_of_tests_may_have_an_empty_column() -> None:
    assert score("print(input())", {"inputs": ["1"], "outputs": [1], "fn_name": None, "asserts": None})["score"] == 1.0


def test_endless_fences_take_no_time() -> None:
    pool = pool_of({"code": 1.0}, {"code": {"sandbox": "limits"}}, timeout_s=60.0)
    texts = ["```" + "x" * 200_000, "```" + " " * 200_000, "```\n" * 50_000, "` ```" * 50_000, "- ```a " * 50_000]
    found = pool.score([trajectory("code", text, SUM, {}) for text in texts])
    pool.close()
    assert [isinstance(one, Score) and one.score for one in found] == [0.0] * len(texts), "in time, too"


@sampled(3)
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(3600)",
        "x = bytearray(4 << 30); print(3)",
        "print('x' * (1 << 24))",
        "raise SystemExit(3)",
        "import os; os.abort()",
        "import os\nif os.fork() == 0:\n    while True: pass\nwhile True: pass",
        "open('/etc/passwd', 'w').write('x')" if os.getuid() else "open('/proc/sysrq', 'w').write('x')",
        "def f(): f()\nf()",
        "(",
        "9**9**9",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_programs_that_mean_harm_score_nothing(sandbox: str, program: str) -> None:
    assert score(program, sandbox=sandbox, seconds=1)["score"] == 0.0


@needs("bubblewrap")
def test_the_sandbox_shows_neither_files_nor_network_nor_neighbours(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: server.accept(), daemon=True).start()
    once = json.dumps({"inputs": [""], "outputs": ["nothing"]})
    for attempt in (
        f"open({str(secret)!r}).read()",
        f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)",
        f"import os; os.kill({os.getpid()}, 0)",
        "open('/usr/x', 'w')",
        "[kill(each) for each in range(2, 40_000)]; raise OSError",
    ):
        program = f"{KILL}try:\n    {attempt}\nexcept Exception:\n    print('nothing')"
        assert score(program, once, sandbox="bubblewrap")["score"] == 1.0, attempt
    assert secret.read_text() == "42"


def test_code_is_refused_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("code", "ratchet.rlhf.rewards.code:compute_score"):
        limits = {name: {"sandbox": "limits"}}
        with pytest.raises(UserError, match=r"reward\.allow_code: true"):
            check_rewards(RewardConfig(function=name, options=limits))
        check_rewards(RewardConfig(function=name, options=limits, allow_code=True))
        with pytest.raises(UserError, match=r"sandbox 'bwrap': Input should be 'bubblewrap' or 'limits'"):
            check_rewards(RewardConfig(function=name, options={name: {"sandbox": "bwrap"}}, allow_code=True))
    with pytest.raises(UserError, match="write bubblewrap or limits"):
        score("print(3)", sandbox="bwrap")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no bwrap here: install bubblewrap"):
        check_rewards(RewardConfig(function="code", allow_code=True))


def test_a_program_cannot_say_that_its_assertions_hold(sandbox: str) -> None:
    never = json.dumps({"asserts": "assert False"})
    for end in ("", "import os; os._exit(0)", "raise SystemExit"):
        program = f"print('__every assertion holds__', flush=True)\nprint(open('program.py').read())\n{end}"
        assert score(program, never, sandbox=sandbox, seconds=1)["score"] == 0.0


def test_tests_after_one_that_ran_out_of_time_are_not_tried(sandbox: str) -> None:
    many = json.dumps({"inputs": ["1", *"2" * 100], "outputs": ["1", *"2" * 100]})
    began = time.monotonic()
    found = score("x = input()\nwhile x != '1': pass\nprint(x)", many, sandbox=sandbox, seconds=2)
    assert found == {"score": 0.0, "passed": 1 / 101}
    assert time.monotonic() - began < 60, "else it takes 100 s at the least"


def test_a_program_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    """As a reward's process is killed that has taken too long. Bubblewrap sees to it by itself."""
    noted = tmp_path / "pid"
    program = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    limits = "seconds=600, memory_mb=512, sandbox='limits'"
    run = f"from ratchet.rlhf.rewards.code import *; run({program!r}, '', False, {limits})"
    waits = subprocess.Popen([sys.executable, "-c", run])
    while not (noted.exists() and noted.read_text()):
        assert waits.poll() is None
        time.sleep(0.05)
    program_itself = psutil.Process(int(noted.read_text()))
    waits.kill()
    wait_until(lambda: has_ended(program_itself))
