"""All chunks that a rollout engine gives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from ratchet.rlhf import event_loop
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling


def chunks_of(engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> list[list[Chunk]]:
    """Returns the chunks of each request, which are made together."""

    async def whole(request: Request) -> list[Chunk]:
        try:
            async with aclosing(engine.stream(request, sampling)) as stream:
                return [chunk async for chunk in stream]
        finally:
            engine.leave()

    async def everyone() -> list[list[Chunk]]:
        engine.join(len(requests))
        return await event_loop.gather([whole(request) for request in requests])

    return event_loop.run(everyone())
