"""Checks an agent's program: plays episodes of it over the real endpoint, with a policy that needs no model."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ratchet.rlhf import event_loop, seeding
from ratchet.rlhf.agents import agent
from ratchet.rlhf.agents.agent import KEY, AgentFailed
from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.programs import AgentCalls
from ratchet.rlhf.agents.sessions import Policy, Recorded
from ratchet.rlhf.config.sections import AgentConfig, OnError
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue, Result
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling, limit_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

END = "<|end|>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}]"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}{% if message.role == 'assistant' %}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Only answers of the policy have an end."""
TOKENS = 2**20
"""Longest conversation."""


def check_agent(
    name: str,
    tasks: Sequence[Mapping[str, object]],
    turns: Sequence[str] = (),
    *,
    timeout_s: float = 60.0,
    **options: object,
) -> list[Result]:
    """Runs an agent's program over a real endpoint: each task alone, twice, and then all tasks at the same time.

    The program takes the arguments of its calls, calls the policy, and ends: with a number, a dictionary of numbers
    with `reward` among them, or None. It asks and returns the same each time, so episodes share no state.

    Args:
        name: ``package.module:function`` or ``file.py:function``, as in `rollout.agent`.
        tasks: `messages`, `ground_truth` and `extra_info` of prompts; a single one is played beside itself.
        turns: the policy's first, second, … answer in a conversation. Further answers are made-up words, which depend
            only on the conversation.
        timeout_s: `rollout.agent.timeout_s`.
        options: `rollout.agent.options`.

    Returns:
        The reward and its named parts for each task.

    Raises:
        UserError: what does not hold.
    """
    if not tasks:
        raise UserError("check_agent needs a task, such as {'messages': [{'role': 'user', 'content': '2+3?'}]}")
    agent.check_agent(name, options)
    program, tokenizer, gateway = agent.load_agent(name), _tokenizer(), Gateway("127.0.0.1")
    where = f"{inspect.getsourcefile(program)}:{inspect.getsourcelines(program)[1]}"
    calls = AgentCalls(
        program,
        options,
        gateway=gateway,
        context=TOKENS,
        max_calls=AgentConfig(name=name).max_calls,
        timeout_s=timeout_s,
        on_error="fail",
        must_reward=False,
    )
    engine = _Words(turns, tokenizer)
    generator = Generator(engine, tokenizer, interruptible=False)
    generator.resume(0, engine)

    # a single task is played beside itself
    played = list(tasks) if len(tasks) > 1 else [*tasks, *tasks]
    names = [f"task {number}" for number in range(len(played))]

    def play(how: str, which: slice) -> list[_Episode]:
        return _play(generator, calls, [f"{name} {how}" for name in names[which]], played[which], timeout_s)

    try:
        alone, again = (
            [episode for number in range(len(played)) for episode in play(how, slice(number, number + 1))]
            for how in ("alone", "again")
        )
        _require_same(names, alone, again, "the second time")
        _require_same(names, alone, play("beside others", slice(None)), "while another episode runs")
    except (AgentFailed, _Differs) as error:
        raise UserError(f"{where}: {error}") from None
    finally:
        event_loop.run(gateway.stop())
    return [episode.result for episode in alone[: len(tasks)]]


class _Episode(NamedTuple):
    """What an episode did."""

    answers: list[Recorded]
    """What it asked, and was answered."""
    result: Result


class _Differs(Exception):
    """Two episodes of a task differ."""


def _require_same(names: Sequence[str], expected: Sequence[_Episode], found: Sequence[_Episode], when: str) -> None:
    for name, one, other in zip(names, expected, found, strict=True):
        questions, others = ([answer.digest for answer in episode.answers] for episode in (one, other))
        # threads may call in any order
        if sorted(questions) != sorted(others):
            at = next((n for n, pair in enumerate(zip(questions, others, strict=False)) if pair[0] != pair[1]), None)
            differs = (
                f"makes {len(others)} calls instead of {len(questions)}"
                if at is None
                else f"asks {other.answers[at].asked:.200} instead of {one.answers[at].asked:.200} in call {at}"
            )
        elif one.result != other.result:
            differs = f"returns {_told(other.result)} instead of {_told(one.result)}"
        else:
            continue
        raise _Differs(
            f"{KEY} {differs} for {name} {when}: keep state in local variables, not in the module, and draw nothing at "
            "random"
        )


def _told(result: Result) -> object:
    return {"reward": result.reward, **result.parts} if result.parts else result.reward


class _Together:
    """Runs programs that all call before any of them is answered, so that their episodes overlap."""

    on_error: OnError = "fail"
    scope = "check"

    def __init__(self, calls: AgentCalls, names: Iterable[str], timeout_s: float) -> None:
        self._calls, self._timeout_s = calls, timeout_s
        self.answers: dict[str, list[Recorded]] = {name: [] for name in names}
        self._silent = set(self.answers)
        """The episodes that have not called yet."""
        self._all_called = asyncio.Event()

    async def run(self, dialogue: Dialogue, policy: Policy, recorded: Sequence[Recorded]) -> None:
        try:
            await self._calls.run(dialogue, policy, recorded)
        finally:
            self._called(dialogue.request.trajectory_id)

    async def record(self, answer: Recorded) -> None:
        """The program receives an answer when this returns."""
        self.answers[answer.trajectory_id].append(answer)
        self._called(answer.trajectory_id)
        try:
            # half, so that this fails before the silent program does
            async with asyncio.timeout(self._timeout_s / 2):
                await self._all_called.wait()
        except TimeoutError:
            raise AgentFailed(
                f"{KEY} makes no call while another episode waits for an answer ({min(self._silent)}): an async "
                "program awaits its calls, and no program holds a lock while it calls"
            ) from None

    def _called(self, name: str) -> None:
        self._silent.discard(name)
        if not self._silent:
            self._all_called.set()


def _play(
    generator: Generator,
    calls: AgentCalls,
    names: Sequence[str],
    tasks: Sequence[Mapping[str, object]],
    timeout_s: float,
) -> list[_Episode]:
    """Plays tasks at the same time."""
    together = _Together(calls, names, timeout_s)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=TOKENS, seed=0)
    rules = Rules(sampling, agents=together, recorder=together)
    dialogues = [Dialogue(Request(name, ()), _beginning(task)) for name, task in zip(names, tasks, strict=True)]
    generator.submit([(dialogue, rules) for dialogue in dialogues])
    episodes: dict[str, _Episode] = {}
    try:
        while len(episodes) < len(dialogues):
            for dialogue in generator.wait(1.0):
                assert dialogue.result is not None, "a complete trajectory of an agent has a result"
                name = dialogue.request.trajectory_id
                episodes[name] = _Episode(together.answers[name], dialogue.result)
    finally:
        generator.cancel(dialogues)
    return [episodes[name] for name in names]


def _beginning(task: Mapping[str, object]) -> Beginning:
    messages, truth = task.get("messages", []), task.get("ground_truth")
    is_json = not isinstance(truth, str | None)
    return Beginning(
        messages,  # type: ignore[arg-type]  # as the test's author wrote them
        json.dumps(truth) if is_json else truth,  # type: ignore[arg-type]
        is_json,
        json.dumps(task.get("extra_info", {})),
    )


class _Words(RolloutEngine):
    """Writes given turns, then made-up words. An answer depends only on what it follows, as a greedy model's does."""

    def __init__(self, turns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._turns, self._tokenizer = turns, tokenizer
        self._end = tokenizer.convert_tokens_to_ids(END)

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        turn = request.prompt_ids.count(self._end)
        rng = seeding.generator(sampling.seed, "words", *request.prompt_ids)
        made_up = " ".join("".join(rng.choice([*"abcdeghilmnorstu"], 5)) for _ in range(rng.integers(1, 4)))
        text = self._turns[turn] if turn < len(self._turns) else made_up
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        ids = self._tokenizer.encode(text[: min(ends, default=len(text))], add_special_tokens=False)
        ids, limit = ids if ends else [*ids, self._end], limit_of(request, sampling)
        yield Chunk(tuple(ids[:limit]), (0.0,) * len(ids[:limit]), "stop" if len(ids) <= limit else "length")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> int:
        return 0

    def place(self, *, model: bool, optimizer: bool) -> None:
        pass

    def close(self) -> None:
        pass


def _tokenizer() -> PreTrainedTokenizerBase:
    """Returns a tokenizer that has a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {token: number for number, token in enumerate([END, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    of_bytes = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token=END, pad_token=END, chat_template=TEMPLATE
    )
    return tokenizer
