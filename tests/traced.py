"""A process that plays trajectories of a tiny model, for the tests of spans: with tools, or with an agent's program."""

from __future__ import annotations

import string
import sys
import tempfile
from pathlib import Path
from typing import Any

from ratchet.rlhf.agents.agent_loop import Rules
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.programs import AgentCalls
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue
from ratchet.rlhf.environments.guarded_calls import EnvironmentCalls
from ratchet.rlhf.environments.tools import Environment
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.rollout.engine import Request, Sampling
from tests import agents, tiny
from tests.environments import Script
from tests.unit.test_environments import ScriptedEngine, generator_of, id_of, wait_for

SECRET = "teh"


def asks(task: Any, base_url: str, api_key: str, model: str) -> None:
    """Takes two turns with a tool, and another one in a conversation of its own."""
    client = agents.CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [*task["messages"]]
    for _ in range(2):
        tools: list[Any] = [agents.TOOL]
        message = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": SECRET} for call in message.tool_calls or ()]
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "so"}])


def main(kind: str) -> None:
    from ratchet.rlhf.config import ModelConfig
    from ratchet.rlhf.environments.environment import Observation

    with tempfile.TemporaryDirectory() as folder:
        calls = [agents.TOOL_CALL, '<tool_call>{"name": "shout", "arguments": {"text": "teh"}}</tool_call>']
        model = tiny.model_folder(Path(folder) / "model", letters=string.printable)
        (Path(folder) / "template.jinja").write_text(tiny.CHAT_TEMPLATE)
        template = str(Path(folder) / "template.jinja")
        tokenizer = load_tokenizer(ModelConfig(path=str(model), dtype="float32", chat_template=template))
        sampling = Sampling(temperature=0.5, top_p=1.0, max_tokens=400, seed=3)
        beginning: Any = Beginning([{"role": "user", "content": "hi"}], "0", False, "{}", ())
        dialogue = Dialogue(Request(id_of(0), (5, 6)), beginning)
        if kind == "tools":
            turns = [calls[1], SECRET]
            environments = EnvironmentCalls(Environment, {"functions": ["tests.tool_functions:shout"]})
            rules = Rules(sampling, environments, 4, partner="tools")
        elif kind == "environment":
            turns = ["an", SECRET]
            script = {"scripts": [[Observation("no", 0.5), RuntimeError("teh end")]], "heard": [[]]}
            environments = EnvironmentCalls(Script, script, on_error="drop")
            rules = Rules(sampling, environments, 4, partner="tests.environments:Script")
        else:
            turns = [calls[0], SECRET, "so"]
            programs: Any = {"context": 900, "max_calls": 8, "timeout_s": 600.0, "on_error": "fail"}
            caller = AgentCalls(asks, {}, gateway=Gateway("127.0.0.1"), must_reward=False, **programs)
            rules = Rules(sampling, agents=caller, partner="tests.traced:asks")
        engine = ScriptedEngine(tokenizer, [turns])
        if kind == "agent":  # its conversations have names of their own
            engine.turns[f"{id_of(0)}-b01"] = engine.turns[id_of(0)]
        generator = generator_of(engine, version=7)
        generator.submit([(dialogue, rules)])
        wait_for(generator, [dialogue])
        print(dialogue.finish_reason, dialogue.error)


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        main(kind)
    print("imported" if "opentelemetry.exporter.otlp.proto.http.trace_exporter" in sys.modules else "not imported")
