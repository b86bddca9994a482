"""An agent with a calculator as a tool: an ordinary program, which calls the policy with the official OpenAI client.

    python examples/agent_calculator/agent.py data/calculator

writes sums as prompts (train.parquet, test.parquet), and conversations of somebody who knows how to call the tool, but
mostly guesses (sft.jsonl). The agent is trained with `rollout.agent: examples/agent_calculator/agent.py:run`.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from openai import OpenAI

from ratchet.rlhf.environments.calculator import calculate

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
CALLS = 3
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # making one takes long; copies share its connections


def run(task: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, float]:
    """Answers one question, with the calculator if the policy asks for it.

    Args:
        task: A row of the dataset: `messages`, `ground_truth` (the answer) and `extra_info`.
        base_url: URL of the endpoint.
        api_key: Tells the endpoint which trajectory this is.
        model: Name of the policy.

    Returns:
        The reward, 1 for the right answer, and how often the tool was called.
    """
    client, messages, used = CLIENT.with_options(base_url=base_url, api_key=api_key), list(task["messages"]), 0
    for _ in range(CALLS):
        message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return {"reward": float(message.content == task["ground_truth"]), "calls": used}
        messages.append(message)
        for call in message.tool_calls:
            used += 1
            expression = json.loads(call.function.arguments).get("expression")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(str(expression))})
    return {"reward": 0.0, "calls": used}


def conversations(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns conversations that end with a call of the tool, with an answer after its result, or with a wrong
    guess.
    """
    draw, system = random.Random(seed), {"role": "system", "content": "tools: calculate"}
    rows = []
    for _ in range(count):
        sum_of = expression(draw)
        asked = [system, {"role": "user", "content": sum_of}]
        called = f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{sum_of}"}}}}</tool_call>'
        kind = draw.choice(["call", "answer", "answer", "guess", "guess"])
        if kind == "call":
            messages = [*asked, {"role": "assistant", "content": called}]
        elif kind == "answer":
            told = [{"role": "assistant", "content": called}, {"role": "tool", "content": calculate(sum_of)}]
            messages = [*asked, *told, {"role": "assistant", "content": calculate(sum_of)}]
        else:
            messages = [*asked, {"role": "assistant", "content": str(draw.randint(20, 198))}]
        rows.append({"messages": messages})
    return rows


def expression(draw: random.Random) -> str:
    return f"{draw.randint(10, 99)}+{draw.randint(10, 99)}"


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    for split, count in (("train", 512), ("test", 64)):
        sums = [expression(draw) for _ in range(count)]
        rows = [
            {
                "data_source": "calculator",
                "prompt": [{"role": "user", "content": sum_of}],
                "reward_model": {"style": "rule", "ground_truth": calculate(sum_of)},
            }
            for sum_of in sums
        ]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")
    (out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations(8192, seed=0)))
    print(f"512 sums to learn from, 64 to test, and 8192 conversations are in {out}")


if __name__ == "__main__":
    main()
