"""`ratchet.testing.check_agent`: the wrong programs that it finds, over the real endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.rlhf.environments.dialogues import Result
from ratchet.rlhf.errors import UserError
from ratchet.testing import check_agent
from tests.tiers import sampled

BEFORE = """
import threading
import httpx

LOCK, SEEN, NUMBERS = threading.Lock(), [], iter(range(1000))

def asked(base_url, api_key, model, messages, **others):
    body = {"model": model, "messages": messages, **others}
    headers = {"Authorization": f"Bearer {api_key}"}
    answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=None)
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]

def user(text):
    return {"role": "user", "content": text}

"""
TASKS: Any = [
    {"messages": [{"role": "user", "content": "2+3?"}], "ground_truth": "5"},
    {"messages": [{"role": "user", "content": "1+1?"}], "ground_truth": {"sum": 2}, "extra_info": {"level": 1}},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def agent(folder: Path, body: str, head: str = "def run(task, base_url, api_key, model, times=2):") -> str:
    """Writes a program; its definition is line 17."""
    path = folder / "mine.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{BEFORE}CALL = None\n{head}\n    call = base_url, api_key, model\n{lines}")
    return f"{path}:run"


@pytest.mark.parametrize("count", [1, 2])
def test_an_agent_that_keeps_the_rules(folder: Path, count: int) -> None:
    name = agent(
        folder,
        "messages = [*task['messages']]\n"
        "for _ in range(times):\n"
        "    messages.append({'role': 'assistant', 'content': asked(*call, messages)})\n"
        "    messages.append(user('more'))\n"
        "said = [message['content'] for message in messages if message['role'] == 'assistant']\n"
        "return {'reward': float(said[0] == task['ground_truth']), 'second': said[1] == 'really', 'all': len(said)}",
    )
    results = check_agent(name, TASKS[:count], ["5", "really"], times=3)
    expected = [Result(1.0, {"second": 1.0, "all": 3.0}), Result(0.0, {"second": 1.0, "all": 3.0})]
    assert results == expected[:count]
    made_up = check_agent(name, TASKS)
    assert [result.reward for result in made_up] == [0.0, 0.0]


def test_threads_tools_and_async_programs(folder: Path) -> None:
    name = agent(
        folder,
        "from concurrent.futures import ThreadPoolExecutor\n"
        "tool = {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}\n"
        "questions = [[user(f'{number}?')] for number in range(4)]\n"
        "with ThreadPoolExecutor(4) as threads:\n"
        "    texts = list(threads.map(lambda messages: asked(*call, messages, tools=[tool], stop=['o']), questions))\n"
        "assert all('o' not in (text or '') for text in texts)",
    )
    assert check_agent(name, TASKS) == [Result(None, {})] * 2
    name = agent(
        folder,
        "async with httpx.AsyncClient(base_url=base_url, headers={'Authorization': f'Bearer {api_key}'}) as client:\n"
        "    body = {'model': model, 'prompt': 'once ', 'max_tokens': 3}\n"
        "    return len((await client.post('completions', json=body)).json()['choices'][0]['text'])",
        "async def run(task, base_url, api_key, model):",
    )
    assert check_agent(name, TASKS) == [Result(3.0, {})] * 2


@sampled(3)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return asked(*call, task['messages'])", r"returned '.*', a text: a reward is a number.*\(task 0 alone\)"),
        ("asked(*call, task['messages'])\nreturn {'letters': 1}", r"has the key reward"),
        ("asked(*call, task['messages'])\nreturn float('nan')", r"the reward nan, which is not finite"),
        ("return 1.0", "without an answer of the policy"),
        ("return float(asked(*call, task['messages']))", r"ValueError: could not convert.* at mine.py:19 in run"),
        ("return task['truth']", r"KeyError: 'truth' at mine.py:19 in run \(task 0 alone\)"),
        ("asked(*call, task['messages'], temperature=0.3)", "temperature 0.3 is not the run's"),
        ("LOCK.acquire()\nLOCK.acquire()", r"neither made a call nor returned for rollout.agent.timeout_s 0.2 s"),
        (
            "while True:\n    try:\n        asked(*call, task['messages'])\n    except Exception:\n        pass",
            r"neither made a call nor returned for rollout.agent.timeout_s 0.2 s",
        ),
        (
            "SEEN.append(user('and'))\nasked(*call, [*task['messages'], *SEEN])",
            r'asks .*"and".* in call 0 for task 0 the second time: keep state in local variables',
        ),
        (
            "asked(*call, task['messages'])\nSEEN.append(1)\nif len(SEEN) > 2:\n    asked(*call, task['messages'])",
            r"makes 2 calls instead of 1 for task 0 the second time",
        ),
        (
            "asked(*call, task['messages'])\nreturn {'reward': 1, 'number': next(NUMBERS)}",
            r"returns {'reward': 1.0, 'number': 2.0} instead of {'reward': 1.0, 'number': 0.0} for task 0",
        ),
        (
            "global CALL\nCALL = call\nasked(*CALL, task['messages'])\nasked(*CALL, [user('more')])",
            r"(beside others|while another episode runs)",
        ),
        (
            "global CALL\nCALL = task\nasked(*call, task['messages'])\nreturn float(CALL['ground_truth'] == '5')",
            r"returns (1.0 instead of 0.0 for task 1|0.0 instead of 1.0 for task 0) while another episode runs",
        ),
        (
            "with LOCK:\n    asked(*call, task['messages'])",
            r"makes no call while another episode waits for an answer \(task \d beside others\): an async program",
        ),
    ],
)
def test_wrong_agents_are_found(folder: Path, body: str, says: str) -> None:
    name = agent(folder, body)
    with pytest.raises(UserError, match=says) as found:
        check_agent(name, TASKS, timeout_s=0.2 if "0.2 s" in says else 2.0 if "no call" in says else 60.0)
    assert str(found.value).startswith(f"{folder / 'mine.py'}:17: rollout.agent ")
    assert "\n" not in str(found.value)


def test_an_async_agent_that_blocks_is_found(folder: Path) -> None:
    name = agent(folder, "asked(*call, task['messages'])", "async def run(task, base_url, api_key, model):")
    with pytest.raises(UserError, match="an async program awaits its calls"):
        check_agent(name, TASKS, timeout_s=2.0)


def test_arguments_and_tasks_are_checked_first(folder: Path) -> None:
    name = agent(folder, "asked(*call, task['messages'])")
    with pytest.raises(UserError, match="Define it as `def run"):
        check_agent(name, TASKS, level=2)
    with pytest.raises(UserError, match="needs a task"):
        check_agent(name, [])
