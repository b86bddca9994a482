"""Environments of the packages verifiers and gymnasium, over the real endpoint."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ratchet.rlhf.agents.agent import agent_digest, check_agent, load_agent
from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.programs import AgentCalls
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Request, Sampling
from tests import tiny
from tests.extras import needs


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    with tiny.chat_generator(tmp_path_factory.mktemp("model")) as generator:
        yield generator


def played(generator: Generator, name: str, beginning: Beginning, **options: Any) -> Dialogue:
    """A trajectory of a built-in program."""
    agents = AgentCalls(
        load_agent(name),
        options,
        gateway=Gateway("127.0.0.1"),
        context=600,
        max_calls=8,
        timeout_s=600.0,
        on_error="drop",
        must_reward=True,
    )
    dialogue = Dialogue(Request("it0-p0-s00", ()), beginning)
    generator.submit([(dialogue, Rules(Sampling(temperature=1.0, top_p=1.0, max_tokens=500, seed=2), agents=agents))])
    while not generator.wait(1.0):
        pass
    assert dialogue.error is None, dialogue.error
    return dialogue


@needs("verifiers")
@pytest.mark.parametrize(("kind", "calls"), [("single", 1), ("several", 3), ("tool", 1)])
def test_verifiers(generator: Generator, kind: str, calls: int, tmp_path: Path) -> None:
    import verifiers

    arguments = {"kind": kind}
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    verifiers.load_environment("tests.word_game", **arguments).get_dataset().to_parquet(tmp_path / "prompts.parquet")
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
        signal.signal(number, handler)
    prompt = PromptDataset([tmp_path / "prompts.parquet"])[1]
    beginning = Beginning(prompt.messages, prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info)
    assert (prompt.ground_truth, prompt.messages[-1]) == ("b", {"role": "user", "content": "say a"})
    dialogue = played(generator, "verifiers", beginning, environment="tests.word_game", arguments=arguments)
    [branch] = dialogue.branches
    assert len(branch.calls) == calls
    assert dialogue.result is not None
    text = response_text(branch.ids[branch.turn_starts[-1] :], generator.tokenizer)
    parts = dialogue.result.parts
    assert parts["letters"] == sum(map(str.isalpha, text)) and parts["has_answer"] == float("b" in text)
    assert dialogue.result.reward == parts["letters"] + 2 * parts["has_answer"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers, "it still can be stopped"
    if kind == "tool":
        assert "double" in branch.calls[0].asked, "the policy knows the tool"


@needs("gymnasium")
def test_gymnasium(generator: Generator) -> None:
    beginning = Beginning([{"role": "user", "content": "play"}], None, False, '{"seed": 7}')
    dialogue = played(generator, "gymnasium", beginning, environment="tests.word_game:Echo-v0", arguments={})
    [branch] = dialogue.branches
    decode = partial(response_text, tokenizer=generator.tokenizer)
    assert "seed 7" in decode(branch.request.prompt_ids)
    answers = [decode(branch.ids[start:end]) for start, end in zip(branch.turn_starts, branch.turn_ends, strict=True)]
    assert len(answers) == 3 and dialogue.result is not None
    assert dialogue.result.reward == sum(sum(map(str.isalpha, answer)) for answer in answers)


@needs("verifiers", "gymnasium")
def test_what_is_missing_is_said_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"verifiers:no_such_thing: No module named 'no_such_thing'"):
        check_agent("verifiers", {"environment": "no_such_thing", "arguments": {}})
    with pytest.raises(UserError, match=r"only gymnasium\.spaces\.Text"):
        check_agent("gymnasium", {"environment": "tests.word_game:Numbers-v0", "arguments": {}})
    options = {"environment": "tests.word_game", "arguments": {"kind": "single"}}
    check_agent("verifiers", options)
    before = agent_digest("verifiers", options)
    assert agent_digest("verifiers", {**options, "arguments": {"kind": "tool"}}) != before
    module = importlib.import_module("tests.word_game")
    monkeypatch.setattr("inspect.getsource", lambda source: "other code" if source is module else "")
    assert agent_digest("verifiers", options) != before


def test_the_names_of_the_packages(tmp_path: Path) -> None:
    settings = {"name": "verifiers:wordle", "options": {"hard": True}, "max_turns": 5, "on_error": "retry"}
    agent = tiny.config(tmp_path, rollout__environment=settings).rollout.agent
    assert agent is not None
    assert (agent.name, agent.max_calls, agent.on_error) == ("verifiers", 5, "retry")
    assert agent.options == {"environment": "wordle", "arguments": {"hard": True}}
    short = tiny.config(tmp_path, rollout__environment="gymnasium:texts:Chess-v0").rollout
    assert short.environment is None and short.agent is not None
    assert short.agent.options == {"environment": "texts:Chess-v0", "arguments": {}}
