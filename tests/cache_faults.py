"""Faults of vLLM's prefix cache; this function runs in vLLM's process."""

from __future__ import annotations

from ratchet.rlhf.rollout.vllm_process import VLLM


def keep_cache(vllm: VLLM, keeps: bool) -> None:
    """Makes vLLM report that it has cleared its prefix cache, and keep it."""
    if keeps:
        vllm.llm.reset_prefix_cache = lambda *_, **__: True
    else:
        del vllm.llm.reset_prefix_cache
