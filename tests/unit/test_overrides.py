"""Overrides as a parameter of flows: what Prefect's server accepts and refuses when a flow run is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from ratchet.flows.evaluate import evaluate
from ratchet.flows.rescore import rescore
from ratchet.flows.train import train
from ratchet.rlhf.config import RunConfig, keys
from tests import tiny
from tests.tiers import sampled

FLOWS: list[Any] = [train, evaluate, rescore]


def check(flow: Any, *overrides: str) -> None:
    """Validate as the server does."""
    schema = parameter_schema(flow).model_dump()
    validate({"overrides": list(overrides)}, schema, raise_on_error=True, ignore_required=True)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The paths of the values in a config of plain values."""
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]


def test_all_that_a_run_takes_is_taken(tmp_path: Path) -> None:
    names = [re.sub(r"\[.*?\]", "", name) for name, *_ in keys(RunConfig)]
    names += leaves(tiny.config(tmp_path).model_dump(exclude={"observed"}))
    assert {f"algorithm.{name}.type" for name in ("advantage", "loss", "kl.controller", "experts")} <= {*names}
    others = ("+actor.lr=1", "++actor.lr=1", "algorithm.advantage=grpo", "rollout={engine: vllm, top_p: 0.9}")
    within = ("reward.options.mine.x=1", "pools.a.workers=2", "placement.actor=a", "rollout.environment.options.x=\n1")
    check(train, *(f"{name}=1" for name in names), *others, *within)


@sampled(4)
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
@pytest.mark.parametrize("override", ["actor.lrr=1", "actr.lr=1", "actor.lr", "actor.lr.peak=1", "lr=1", "=1", ""])
def test_a_misspelt_override_is_refused_by_its_name(flow: Any, override: str) -> None:
    with pytest.raises(ValidationError) as refused:
        check(flow, "actor.lr=1", override)
    said = str(refused.value)
    assert "'overrides[1]'" in said
    assert f"{override!r} is not one of ['KEY=VALUE, with a KEY that `ratchet train --help` lists']" in said
    assert len(said) < 250
