"""Generation with any rollout engine: distributing requests over ranks, and interruptible generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlhf.engines import ranks
from rlhf.engines.base import Generation, Request, RolloutEngine, Sampling
from rlhf.errors import NotFinite


def answers(engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
    """Generate responses on all ranks; each rank generates a share and gets all responses.

    Args:
        engine: this rank's rollout engine.
        requests: all trajectories to generate, the same on every rank.
        sampling: how to sample tokens.

    Returns:
        One response per request, in the same order.

    Raises:
        NotFinite: a log-prob is not finite.
    """
    shares = deal(requests, sampling, ranks.count())
    results = ranks.gathered(engine.generate([requests[row] for row in shares[ranks.rank()]], sampling))
    by_row = {
        row: generation
        for rows, generations in zip(shares, results, strict=True)
        for row, generation in zip(rows, generations, strict=True)
    }
    for generation in by_row.values():  # every rank checks all responses, so that all ranks raise
        if not all(map(math.isfinite, generation.log_probs)):
            raise NotFinite("the model gave log-probs that are not finite while generating: nothing is committed")
    return [by_row[row] for row in range(len(requests))]


def deal(requests: Sequence[Request], sampling: Sampling, rank_count: int) -> list[list[int]]:
    """Split requests into shares with about the same number of expected tokens.

    Prompts are assigned in order of decreasing cost, each to the rank with the fewest tokens. Trajectories of a prompt
    stay together, since an engine may compute their prompt only once.

    Args:
        requests: the trajectories to generate.
        sampling: gives the maximum length of a response.
        rank_count: number of shares.

    Returns:
        Sorted rows of `requests` for each rank.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for row, request in enumerate(requests):
        prompts.setdefault(request.prompt_ids, []).append(row)
    shares: list[list[int]] = [[] for _ in range(rank_count)]
    tokens = [0] * rank_count
    for ids, rows in sorted(prompts.items(), key=lambda item: -len(item[0]) - len(item[1]) * sampling.max_tokens):
        rank = tokens.index(min(tokens))
        shares[rank] += rows
        tokens[rank] += len(ids) + len(rows) * sampling.max_tokens
    return [sorted(rows) for rows in shares]


@dataclass
class Interruptible:
    """The generation of a shard in pieces; the engine may load new weights between two pieces."""

    requests: Sequence[Request]
    generations: list[Generation] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    """For each request, the version of the policy that sampled each token."""
    seconds: float = 0.0
    """Time that the pieces before the last one took."""

    def generate_piece(self, engine: RolloutEngine, sampling: Sampling, tokens: int, version: int) -> bool:
        """Generate the next piece of every incomplete response.

        Args:
            engine: this rank's rollout engine.
            sampling: how to sample tokens.
            tokens: maximum number of new tokens per response.
            version: version of the policy whose weights the engine has.

        Returns:
            Whether all responses are complete.

        Raises:
            NotFinite: a log-prob is not finite.
        """
        if not self.generations:
            self.generations = [Generation((), (), "length") for _ in self.requests]
            self.versions = [[] for _ in self.requests]
        incomplete = [row for row, generation in enumerate(self.generations) if generation.finish_reason != "stop"]
        length = max(len(self.generations[row].response_ids) for row in incomplete)
        requests = [
            replace(
                self.requests[row],
                prompt_ids=self.requests[row].prompt_ids + self.generations[row].response_ids,
                generated_tokens=self.requests[row].generated_tokens + length,
            )
            for row in incomplete
        ]
        piece = min(tokens, sampling.max_tokens - length)
        for row, new in zip(incomplete, answers(engine, requests, replace(sampling, max_tokens=piece)), strict=True):
            old = self.generations[row]
            self.generations[row] = Generation(
                old.response_ids + new.response_ids, old.log_probs + new.log_probs, new.finish_reason
            )
            self.versions[row] += [version] * len(new.response_ids)
        return length + piece == sampling.max_tokens or all(
            generation.finish_reason == "stop" for generation in self.generations
        )
