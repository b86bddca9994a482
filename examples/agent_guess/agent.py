"""An agent that plays a guessing game: an ordinary program, which calls the policy with the official OpenAI client.

It is trained with `rollout.agent: examples/agent_guess/agent.py:run`, and plays against any other chat endpoint when it
is given another base URL, key and model. `examples/guess/guess.py` is the same game as an environment.
"""

from typing import Any

from openai import OpenAI

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # making one takes long; copies share its connections
GUESSES = 4  # enough for 15 numbers with binary search


def run(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Plays one game.

    Args:
        task: A row of the dataset: `messages`, `ground_truth` (the number to guess) and `extra_info`.
        base_url: URL of the endpoint.
        api_key: Tells the endpoint which game this is.
        model: Name of the policy.

    Returns:
        The reward: 1 if the number was guessed.
    """
    client, secret = CLIENT.with_options(base_url=base_url, api_key=api_key), int(task["ground_truth"])
    messages: list[Any] = list(task["messages"])
    for _ in range(GUESSES):
        guess = client.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""
        if not (guess.isascii() and guess.isdigit()) or len(guess) > 3:
            return 0.0  # not a number
        if int(guess) == secret:
            return 1.0
        hint = "up" if int(guess) < secret else "down"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return 0.0
