"""What a config's tree of plain values, validated or not, says of the policy that generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def generates_stale(tree: Mapping[str, Any]) -> bool:
    """Tell whether a config lets trajectories be older than the weights that they train."""
    mode = _section(tree, "rollout").get("mode", "sync")
    return bool(mode != "sync") or _section(tree, "data").get("replay") is not None


def generates_with_other_rounding(tree: Mapping[str, Any]) -> bool:
    """Tell whether a config generates with another program than the trainer's, in less than float32."""
    rollout, model = _section(tree, "rollout"), _section(tree, "model")
    engine = rollout.get("engine")
    chosen = engine if isinstance(engine, Mapping) else {"type": engine}
    is_rounded = model.get("dtype") != "float32" or chosen.get("quantization") is not None
    return chosen.get("type") in ("vllm", "server") and is_rounded


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}
