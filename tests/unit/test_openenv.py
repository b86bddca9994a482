"""Environments on a real server of OpenEnv, over the real endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ratchet.rlhf.agents.agent import agent_digest, check_agent
from ratchet.rlhf.agents.agent_loop import Generator
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import Beginning
from ratchet.rlhf.errors import UserError
from ratchet.testing import check_agent as check_played
from tests import tiny
from tests.extras import needs
from tests.openenv_server import server
from tests.unit.test_other_environments import played


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    with tiny.chat_generator(tmp_path_factory.mktemp("model")) as generator:
        yield generator


@needs("openenv")
def test_an_episode(generator: Generator) -> None:
    beginning = Beginning([{"role": "user", "content": "play"}], None, False, '{"reset": {"seed": 7}}')
    with server() as url:
        dialogue = played(generator, "openenv", beginning, environment=url, arguments={})
    [branch] = dialogue.branches
    decode = partial(response_text, tokenizer=generator.tokenizer)
    assert "seed 7: which letters?" in decode(branch.request.prompt_ids)
    assert "question 1" in decode(branch.ids) and "question 3" not in decode(branch.ids)
    answers = [decode(branch.ids[start:end]) for start, end in zip(branch.turn_starts, branch.turn_ends, strict=True)]
    assert len(answers) == 3 and dialogue.result is not None
    assert dialogue.result.reward == sum(sum(map(str.isalpha, answer)) for answer in answers)


@needs("openenv")
def test_actions_of_several_fields_are_json() -> None:
    task = {"messages": [{"role": "user", "content": "play"}], "extra_info": {}}
    turns = ['{"x": 1, "y": 2}', "three", '{"x": 4}', '{"x": 5, "y": 6}', '{"x": 0, "y": 0}']
    with server("point") as url:
        [result] = check_played("openenv", [task], turns, environment=url, arguments={})
    assert result.reward == 1 + 2 + 5 + 6, "an answer that is not an action gets an error, and the policy tries again"


@needs("openenv")
def test_errors_of_the_server_are_told(tmp_path: Path) -> None:
    task = {"messages": [{"role": "user", "content": "play"}], "extra_info": {}}
    with server() as url:
        options = {"environment": url, "arguments": {}}
        check_agent("openenv", options)
        digest = agent_digest("openenv", options)
        with pytest.raises(UserError, match="the server refused step: broken"):
            check_played("openenv", [task], ["break"], **options)
    with server("point") as other:
        assert agent_digest("openenv", {**options, "environment": other}) != digest
    with pytest.raises(UserError, match=r"openenv:http.*no server of OpenEnv answers there: .*; start it first"):
        check_agent("openenv", options)


def test_a_server_is_named_by_its_url(tmp_path: Path) -> None:
    settings = {"name": "openenv:http://127.0.0.1:8000", "options": {"action": "text"}, "max_turns": 5}
    agent = tiny.config(tmp_path, rollout__environment=settings).rollout.agent
    assert agent is not None and (agent.name, agent.max_calls) == ("openenv", 5)
    assert agent.options == {"environment": "http://127.0.0.1:8000", "arguments": {"action": "text"}}
