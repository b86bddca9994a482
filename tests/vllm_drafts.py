"""How many tokens vLLM draws at once; these functions run in its process."""

from __future__ import annotations

from typing import Any

from ratchet.rlhf.rollout.vllm_process import VLLM


def watch(vllm: VLLM) -> None:
    """Begins to note the largest number of tokens that a request gets in a step."""
    core = vllm.llm.llm_engine.engine_core
    original: Any = core.get_output
    vllm.most = 0  # type: ignore[attr-defined]

    def get_output() -> Any:
        found = original()
        vllm.most = max([vllm.most, *(len(one.new_token_ids) for one in found.outputs)])  # type: ignore[attr-defined]
        return found

    core.get_output = get_output


def most(vllm: VLLM) -> int:
    return vllm.most  # type: ignore[attr-defined, no-any-return]
