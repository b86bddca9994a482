"""The interface of rollout engines, and the plain data that they exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from ratchet.rlhf import event_loop, seeding

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int
    from torch import Tensor

    from ratchet.rlhf.config.sections import ResponseConfig, SamplingConfig


@dataclass(frozen=True)
class Request:
    """One trajectory to generate."""

    trajectory_id: str
    prompt_ids: tuple[int, ...]
    mask: tuple[int, ...] = ()
    """For the tokens at the end of `prompt_ids` after which the response continues: 1 if the policy drew it, else 0."""
    max_tokens: int | None = None
    """Limit on the new tokens of this request, in addition to `Sampling.max_tokens`; None: no further limit."""
    images: tuple[bytes, ...] = ()
    """The encoded images of the placeholders in `prompt_ids` that the policy did not draw, in order."""

    @property
    def generated_tokens(self) -> int:
        """Number of tokens at the end of `prompt_ids` that belong to the response."""
        return len(self.mask)


@dataclass(frozen=True)
class Sampling:
    """How to sample tokens. The noise of a trajectory depends only on `seed` and the trajectory's id."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Texts that end a response; they are kept in the response."""
    seeds: Literal["trajectory", "engine"] = "trajectory"
    """`engine`: the engine's own noise; `seed` has no effect. See `seed_of`."""
    top_k: int = 0
    """Draw from this many most likely tokens; 0: from all."""
    min_p: float = 0.0
    """Draw from tokens with at least this share of the most likely token's probability (arXiv 2407.01082)."""

    @classmethod
    def of(cls, response: ResponseConfig, *, temperature: float, seed: int) -> Sampling:
        """Builds the sampling that the config asks for, at a temperature."""
        return cls(
            temperature=temperature,
            top_p=response.top_p,
            top_k=response.top_k,
            min_p=response.min_p,
            max_tokens=response.max_response_tokens,
            stop=response.stop,
            seed=seed,
        )

    @classmethod
    def of_rollout(cls, rollout: SamplingConfig, seed: int) -> Sampling:
        """Builds the sampling of trajectories to learn from."""
        sampling = cls.of(rollout, temperature=rollout.temperature, seed=seed)
        return replace(sampling, ignore_eos=rollout.ignore_eos, seeds=rollout.seeds)

    @property
    def truncates(self) -> bool:
        """True if some tokens are never drawn; at temperature 0 there is nothing to truncate."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def parameters(self) -> dict[str, float | list[str]]:
        """The options as vLLM and SGLang call them, neutral if nothing is truncated."""
        truncation = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {
            "temperature": self.temperature,
            **(truncation if self.truncates else neutral),
            "stop": list(self.stop),
        }


@dataclass(frozen=True)
class Generation:
    """A response: its tokens (including end-of-sequence), their log-probs, and the finish reason."""

    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-prob of each response token, in nats."""
    finish_reason: str
    """`stop` (end-of-sequence or a stop text) or `length`."""


def joined(chunks: Sequence[Chunk]) -> Generation:
    """Joins the chunks of a response."""
    reason = chunks[-1].finish_reason
    assert reason is not None, "the last chunk has a finish reason"
    return Generation(
        response_ids=tuple(token for chunk in chunks for token in chunk.response_ids),
        log_probs=tuple(log_prob for chunk in chunks for log_prob in chunk.log_probs),
        finish_reason=reason,
    )


def canary_requests(texts: Sequence[Sequence[int]], drawn: int) -> tuple[list[Request], Sampling]:
    """Returns the requests of `RolloutEngine.score`, and how they are sampled."""
    requests = [Request(f"canary-{number}", tuple(text)) for number, text in enumerate(texts)]
    return requests, Sampling(temperature=1.0, top_p=1.0, max_tokens=drawn, seed=0, ignore_eos=True, seeds="engine")


def with_answers(texts: Sequence[Sequence[int]], answers: Sequence[Generation]) -> list[list[int]]:
    """Joins texts and the tokens that were drawn after them."""
    return [[*text, *answer.response_ids] for text, answer in zip(texts, answers, strict=True)]


def scored_of(
    texts: Sequence[Sequence[int]], answers: Sequence[Generation], log_probs: Sequence[Sequence[float]]
) -> list[Scored]:
    """Splits the log-probs of `with_answers` into those of the texts and those of the drawn tokens."""
    return [
        Scored(tuple(values[: len(text) - 1]), answer.response_ids, answer.log_probs, tuple(values[len(text) - 1 :]))
        for text, answer, values in zip(texts, answers, log_probs, strict=True)
    ]


def limit_of(request: Request, sampling: Sampling) -> int:
    """Returns the maximum number of new tokens for a request."""
    return sampling.max_tokens if request.max_tokens is None else min(request.max_tokens, sampling.max_tokens)


def seed_of(request: Request, sampling: Sampling) -> int | None:
    """Derives the seed of a request, a non-negative int64; None if the engine uses its own noise."""
    if sampling.seeds == "engine":
        return None
    # a continuation must not draw the noise of the beginning again
    place = [request.generated_tokens] if request.generated_tokens else []
    return int(seeding.generator(sampling.seed, "generate", request.trajectory_id, *place).integers(2**63))


@dataclass(frozen=True)
class Chunk:
    """Tokens that an engine has generated for a request since its previous chunk."""

    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-prob of each token, in nats."""
    finish_reason: str | None = None
    """`stop` (end-of-sequence or a stop text) or `length` in the last chunk of a response; None: more chunks follow."""
    routes: Int[np.ndarray, "tokens slots"] | None = None
    """In the last chunk of a response: the experts that the model chose for each token that it read, from the request's
    first on, int16; the second dimension has those of all layers with experts. None: the engine does not record them.
    """


@dataclass(frozen=True)
class Scored:
    """A text as an engine scores it, all at temperature 1 and in nats."""

    log_probs: tuple[float, ...]
    """Log-prob of each of the text's tokens but the first."""
    drawn_ids: tuple[int, ...] = ()
    """Tokens that the engine drew after the text."""
    drawn_log_probs: tuple[float, ...] = ()
    """Their log-probs as they were drawn, perhaps after a cached text."""
    again: tuple[float, ...] = ()
    """Their log-probs, computed once more without a cache."""


class RolloutEngine(ABC):
    """A model that generates responses. Requests may join and leave while others run."""

    in_batches: ClassVar[bool] = False
    """True if requests are generated in fixed batches: rounding depends on a batch's requests, but is repeatable.

    Such an engine starts when every request announced by `join` is waiting.
    """

    @abstractmethod
    def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Generates a response. The same request and weights give the same response, except for rounding.

        Log-probs are computed from the temperature-scaled logits, before truncation (`top_p`, `top_k`, `min_p`); at
        temperature 0 (greedy), from the plain logits. Closing the generator cancels the request.

        Raises:
            EngineLost: the engine's process or server does not answer.
        """

    def join(self, count: int) -> None:  # noqa: B027  (for engines that generate in batches)
        """Announces trajectories, each of which makes requests until its `leave`."""

    def leave(self) -> None:  # noqa: B027
        """Reports that an announced trajectory makes no further requests."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
        """Generates responses and waits for all of them; returns one per request, in the same order."""
        return event_loop.run(self._generate_all(requests, sampling))

    async def _generate_all(self, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
        async def whole(request: Request) -> Generation:
            try:
                # closing the stream cancels the request if this fails
                async with aclosing(self.stream(request, sampling)) as stream:
                    return joined([chunk async for chunk in stream])
            finally:
                self.leave()

        self.join(len(requests))
        return await event_loop.gather([whole(request) for request in requests])

    def score(self, texts: Sequence[Sequence[int]], drawn: int) -> dict[str, list[Scored]]:
        """Scores texts with the engine's weights, and draws tokens after them. No other request may be running.

        Args:
            texts: token ids, at least two each; the engine has room for `drawn` more, and one.

        Returns:
            One per text, for each copy of the model that the engine uses, by its name: a server's URL, or ``""``.

        Raises:
            EngineLost: the engine's process or server does not answer.
        """
        raise AssertionError(f"{type(self).__name__} is not asked to: see RolloutEngineConfig.scores_texts")

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> int:
        """Replaces the weights in place, and returns the number of bytes moved. No request may be running.

        If the engine has made room, this takes only the memory of the weights; `place` takes the rest.

        Args:
            weights: the policy's tensors, named as in a checkpoint, consumed one at a time.
            adapter_config: PEFT's config as JSON if `weights` are an adapter's; None: they are the whole model's.
        """

    @abstractmethod
    def place(self, *, model: bool, optimizer: bool) -> None:
        """Moves the weights to the device, or to host memory to make room for another model. `optimizer` is ignored."""

    def discard(self) -> bool:
        """Makes room as `place` does, but may drop the weights where that is cheaper than keeping them.

        No request may be running. Returns True if the weights are lost: `load_weights` must follow.
        """
        self.place(model=False, optimizer=False)
        return False

    @abstractmethod
    def close(self) -> None:
        """Releases processes and connections."""
