"""A policy that says what a test wants, and remembers each token that it drew."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.agents.checks import END, TEMPLATE
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.programs import AgentCalls
from ratchet.rlhf.agents.sessions import Recorded, Recorder
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling, limit_of

CONTEXT = 2**19
PIECE = 16
"""Number of tokens in a chunk."""


def tokenizer() -> PreTrainedTokenizerBase:
    """A token for each byte, and one for "th", which the policy never draws: to tokenize its text again shows."""
    tokens = {token: number for number, token in enumerate([END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"])}
    of_bytes = Tokenizer(models.BPE(vocab=tokens, merges=[("t", "h")]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token=END, pad_token=END, chat_template=TEMPLATE)


class Scripted(RolloutEngine):
    """Says a turn of the script in each answer, the one after the number of answers in the conversation."""

    def __init__(self, script: Sequence[str], of: PreTrainedTokenizerBase) -> None:
        self.script, self._tokenizer = list(script), of
        self.drawn: dict[float, int] = {}
        """The tokens by their log-probs, all of which differ."""
        self._end = of.convert_tokens_to_ids(END)

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        turn = min(request.prompt_ids.count(self._end), len(self.script) - 1)
        text = self.script[turn]
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        letters = text[: min(ends, default=len(text))]
        ids = [token for letter in letters for token in self._tokenizer.encode(letter)]
        ids = (ids if ends else [*ids, self._end])[: limit_of(request, sampling)]
        for start in range(0, len(ids), PIECE):
            piece = ids[start : start + PIECE]
            log_probs = [-(len(self.drawn) + number + 1) / 1024 for number in range(len(piece))]
            self.drawn.update(zip(log_probs, piece, strict=True))
            is_last = start + PIECE >= len(ids)
            reason = None if not is_last else "stop" if ends or ids[-1] == self._end else "length"
            yield Chunk(tuple(piece), tuple(log_probs), reason)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> int:
        return 0

    def place(self, *, model: bool, optimizer: bool) -> None:
        pass

    def close(self) -> None:
        pass


class Stage:
    """Runs programs before the scripted policy."""

    def __init__(self, engine: Scripted, generator: Generator, gateway: Gateway) -> None:
        self.engine, self._generator, self._gateway = engine, generator, gateway

    def play(
        self,
        program: object,
        recorder: Recorder | None = None,
        recorded: Sequence[Recorded] = (),
        max_calls: int = 32,
        **options: object,
    ) -> Dialogue:
        """Returns the trajectory of a program."""
        agents = AgentCalls(
            program,
            options,
            gateway=self._gateway,
            context=CONTEXT,
            max_calls=max_calls,
            timeout_s=600.0,
            on_error="drop",
            must_reward=False,
        )
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=CONTEXT, seed=3)
        rules = Rules(sampling, agents=agents, recorder=recorder, recorded={"it0-p0-s00": list(recorded)})
        dialogue = Dialogue(Request("it0-p0-s00", ()), Beginning([{"role": "user", "content": "hi"}], "4", False, "{}"))
        self._generator.submit([(dialogue, rules)])
        while not self._generator.wait(1.0):
            pass
        return dialogue

    def check_drawn(self, dialogue: Dialogue) -> list[str]:
        """Checks that each trained token of each branch was drawn, once; returns the texts of the answers."""
        seen: list[float] = []
        texts: list[str] = []
        for branch in dialogue.branches:
            rows = zip(branch.ids, branch.log_probs, branch.mask, strict=True)
            trained = [(token, log_prob) for token, log_prob, learned in rows if learned]
            assert [token for token, _ in trained] == [self.engine.drawn[log_prob] for _, log_prob in trained]
            seen += [log_prob for _, log_prob in trained]
            spans = zip(branch.turn_starts, branch.turn_ends, strict=True)
            texts += [str(self._generator.tokenizer.decode(branch.ids[start:end])) for start, end in spans]
        assert len(seen) == len(set(seen)) > 0, "no token is trained on twice"
        return texts


@contextmanager
def stage(script: Sequence[str]) -> Iterator[Stage]:
    """Yields a stage, with a real endpoint."""
    from ratchet.rlhf import event_loop

    of, gateway = tokenizer(), Gateway("127.0.0.1")
    engine = Scripted(script, of)
    generator = Generator(engine, of, interruptible=False)
    generator.resume(7, engine)
    yield Stage(engine, generator, gateway)
    event_loop.run(gateway.stop())
