"""What is the same for every rollout engine: ranks share requests, and a generation may be interrupted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlhf.engines import ranks
from rlhf.engines.base import Generation, Request, RolloutEngine, Sampling
from rlhf.errors import NotFinite


def answers(engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
    """Every rank is given all requests, answers its share, and has all the answers. Raises `NotFinite`."""
    dealt = deal(requests, sampling, ranks.count())
    shares = ranks.gathered(engine.generate([requests[row] for row in dealt[ranks.rank()]], sampling))
    found = {row: one for rows, share in zip(dealt, shares, strict=True) for row, one in zip(rows, share, strict=True)}
    for generation in found.values():  # every rank looks at all of them, so that all refuse
        if not all(map(math.isfinite, generation.log_probs)):
            raise NotFinite("the model gave log-probs that are not finite while generating: nothing is committed")
    return [found[row] for row in range(len(requests))]


def deal(requests: Sequence[Request], sampling: Sampling, hands: int) -> list[list[int]]:
    """Rows for each hand, about equal in expected tokens: the longest prompts first, each to whom has the least.
    Trajectories of one prompt stay together, since an engine may compute their prompt once."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    for row, request in enumerate(requests):
        prompts.setdefault(request.prompt_ids, []).append(row)
    dealt: list[list[int]] = [[] for _ in range(hands)]
    tokens = [0] * hands
    for ids, rows in sorted(prompts.items(), key=lambda item: -len(item[0]) - len(item[1]) * sampling.max_tokens):
        hand = tokens.index(min(tokens))
        dealt[hand] += rows
        tokens[hand] += len(ids) + len(rows) * sampling.max_tokens
    return [sorted(rows) for rows in dealt]


@dataclass
class Interruptible:
    """The generation of a shard, in pieces: between two of them, the engine may be given new weights."""

    requests: Sequence[Request]
    generations: list[Generation] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    """Of the policy that drew each token."""
    seconds: float = 0.0
    """That pieces before the last one took."""

    def go_on(self, engine: RolloutEngine, sampling: Sampling, tokens: int, version: int) -> bool:
        """Draw at most so many tokens more, with the policy of this version; whether all responses are complete."""
        if not self.generations:
            self.generations = [Generation((), (), "length") for _ in self.requests]
            self.versions = [[] for _ in self.requests]
        left = [row for row, one in enumerate(self.generations) if one.finish_reason != "stop"]
        begun = max(len(self.generations[row].response_ids) for row in left)
        asked = [
            replace(
                self.requests[row],
                prompt_ids=self.requests[row].prompt_ids + self.generations[row].response_ids,
                begun=self.requests[row].begun + begun,
            )
            for row in left
        ]
        piece = min(tokens, sampling.max_tokens - begun)
        for row, more in zip(left, answers(engine, asked, replace(sampling, max_tokens=piece)), strict=True):
            before = self.generations[row]
            self.generations[row] = Generation(
                before.response_ids + more.response_ids, before.log_probs + more.log_probs, more.finish_reason
            )
            self.versions[row] += [version] * len(more.response_ids)
        return begun + piece == sampling.max_tokens or all(one.finish_reason == "stop" for one in self.generations)
