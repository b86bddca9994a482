"""Environments of the package verifiers, over the real endpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ratchet.rlhf.agents import checks
from ratchet.rlhf.agents.agent import agent_digest, load_agent
from ratchet.rlhf.agents.agent import check_agent as check_agent_settings
from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.programs import AgentCalls
from ratchet.rlhf.agents.verifiers import prompts
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.testing import check_agent
from tests import tiny
from tests.extras import needs

TASKSETS = Path(__file__).parents[1] / "tasksets"


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process, and the servers of tools that verifiers starts, import the tasksets of the tests."""
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setenv("PYTHONPATH", f"{TASKSETS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    with tiny.chat_generator(tmp_path_factory.mktemp("model")) as generator:
        yield generator


def played(generator: Generator, name: str, beginning: Beginning, context: int = 600, **options: Any) -> Dialogue:
    """A trajectory of a built-in program."""
    agents = AgentCalls(
        load_agent(name),
        options,
        gateway=Gateway("127.0.0.1"),
        context=context,
        max_calls=8,
        timeout_s=600.0,
        on_error="drop",
        must_reward=True,
    )
    dialogue = Dialogue(Request("it0-p0-s00", ()), beginning)
    generator.submit(
        [(dialogue, Rules(Sampling(temperature=1.0, top_p=1.0, max_tokens=context - 100, seed=2), agents=agents))]
    )
    while not generator.wait(1.0):
        pass
    assert dialogue.error is None, dialogue.error
    return dialogue


def rows(folder: Path, name: str, **options: Any) -> list[Beginning]:
    """The tasks of a taskset, written as a dataset and read again."""
    pq.write_table(prompts(name, options, 2), folder / "prompts.parquet")
    return [
        Beginning(prompt.messages, prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info)
        for prompt in PromptDataset([folder / "prompts.parquet"])
    ]


@needs("verifiers")
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_verifiers_with_one_answer(generator: Generator, tasksets: None, weight: float, tmp_path: Path) -> None:
    arguments = {"taskset": {"worth": weight}}
    _, beginning = rows(tmp_path, "words-single", **arguments)
    assert beginning.ground_truth == "b"
    assert beginning.messages == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "say a"}]
    dialogue = played(generator, "verifiers", beginning, environment="words-single", arguments=arguments)
    [branch] = dialogue.branches
    decode = partial(response_text, tokenizer=generator.tokenizer)
    assert "(system)be kind(user)say a" in decode(branch.request.prompt_ids)
    assert dialogue.result is not None and len(branch.calls) == 1
    text = decode(branch.ids[branch.turn_starts[-1] :])
    letters = sum(map(str.isalpha, text))
    assert dialogue.result.parts == {"letters": letters, "has_answer": weight * ("b" in text), "turns": 1.0}
    assert dialogue.result.reward == 0.5 * letters + weight * ("b" in text)


@needs("verifiers")
@pytest.mark.parametrize(("turns", "reason"), [(3, "stop"), (20, "length")])
def test_verifiers_with_several_answers(
    generator: Generator, tasksets: None, turns: int, reason: str, tmp_path: Path
) -> None:
    beginning, _ = rows(tmp_path, "words_several")
    dialogue = played(generator, "verifiers", beginning, environment="words_several", arguments={"turns": turns})
    [branch] = dialogue.branches
    decode = partial(response_text, tokenizer=generator.tokenizer)
    answers = [decode(branch.ids[start:end]) for start, end in zip(branch.turn_starts, branch.turn_ends, strict=True)]
    assert dialogue.finish_reason == reason
    assert len(answers) == 3 if reason == "stop" else 3 < len(answers) < turns
    assert f"(user){turns - 1} left" in decode(branch.ids)
    assert dialogue.result is not None
    assert dialogue.result.reward == sum(sum(map(str.isalpha, answer)) for answer in answers), "also at a limit"


@needs("verifiers")
@pytest.mark.slow  # verifiers starts a server of tools
def test_verifiers_with_a_tool(tasksets: None, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    turns = [
        call % ("double", '{"number": 21}'),
        call % ("double", '{"number": 4}'),
        call % ("halve", "{}"),
        "42 and 8",
    ]
    tokenizer = checks._tokenizer()
    engine = checks._Words(turns, tokenizer)
    generator = Generator(engine, tokenizer, interruptible=False)
    generator.resume(0, engine)
    [beginning] = rows(tmp_path, "words_tool")
    dialogue = played(generator, "verifiers", beginning, context=2**16, environment="words_tool", arguments={})
    assert dialogue.result is not None
    assert dialogue.result.parts == {"doubled": 25.0}, "the tool was called, and keeps a state"
    [branch] = dialogue.branches
    text = tokenizer.decode(branch.ids)
    assert len(branch.calls) == 4
    assert all(answer in text for answer in ("[tool]42", "[tool]8", "[tool]error: there is no tool halve"))


@needs("verifiers")
def test_what_verifiers_cannot_play_is_refused(tasksets: None, tmp_path: Path) -> None:
    for name, arguments, says in (
        ("words_two", {}, r"has 2 agents \(asker, solver\)"),
        ("no_such_thing", {}, "'no_such_thing' not found"),
        ("words_single", {"taskset": {"nothing": 1}}, r"options\.taskset\.nothing: "),
        ("words_single", {"agent": {"model": "other"}}, r"options\.agent\.model is decided by the run"),
        ("words_single", {"agent": {"harness": {"id": "bash"}}}, r"options\.agent\.harness is decided by the run"),
    ):
        with pytest.raises(UserError, match=rf"^rollout\.environment verifiers:{name}.*{says}") as refused:
            check_agent_settings("verifiers", {"environment": name, "arguments": arguments})
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="words_several has tasks without end: choose a number with --size"):
        prompts("words_several", {}, None)
    tasks = [{"messages": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(UserError, match=r"has no extra_info\.verifiers: write the dataset with `ratchet data"):
        check_agent("verifiers", tasks, environment="words_single", arguments={})


@needs("verifiers")
def test_another_taskset_is_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "words_changed").mkdir()
    shutil.copy(TASKSETS / "words_single.py", tmp_path / "words_changed" / "__init__.py")
    options = {"environment": "words_changed", "arguments": {"taskset": {"worth": 1.0}}}
    before = agent_digest("verifiers", options)
    assert agent_digest("verifiers", options) == before
    assert agent_digest("verifiers", {**options, "arguments": {}}) != before
    (tmp_path / "words_changed" / "inner.py").write_text("more = 1")
    assert agent_digest("verifiers", options) != before


def test_the_names_of_the_packages(tmp_path: Path) -> None:
    settings = {"name": "verifiers:wordle", "options": {"hard": True}, "max_turns": 5, "on_error": "retry"}
    agent = tiny.config(tmp_path, rollout__environment=settings).rollout.agent
    assert agent is not None
    assert (agent.name, agent.max_calls, agent.on_error) == ("verifiers", 5, "retry")
    assert agent.options == {"environment": "wordle", "arguments": {"hard": True}}
    settings = {"name": "gymnasium:texts:Chess-v0", "options": {"hard": True}, "max_turns": 5}
    config = tiny.config(tmp_path, rollout__environment=settings)
    played = config.rollout.environment
    assert played is not None and config.rollout.agent is None
    assert (played.name, played.max_turns) == ("gymnasium", 5)
    assert played.options == {"environment": "texts:Chess-v0", "arguments": {"hard": True}}
    assert config.with_values({}) == config
