"""How models of 7 B, 32 B and 70 B are sharded, by processes and memory that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratchet.rlhf.models.skeleton import without_memory
from ratchet.rlhf.train.fsdp_engine import FSDPEngine
from tests.ranks import in_another_process, only_rank
from tests.sizes import config_of
from tests.tiers import sampled

LAYERS = 2
"""All layers are alike, so two say what eighty would."""
CONFIGS = {name: config_of(name, LAYERS) for name in ("7 B", "32 B", "70 B")}
OF_ALL_LAYERS = {"7 B": (32, 6.74e9), "32 B": (64, 32.8e9), "70 B": (80, 70.6e9)}
"""Layers and parameters, as their papers have them."""
CUT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def skeleton(name: str) -> PreTrainedModel:
    with without_memory():
        return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa")  # type: ignore[no-any-return]


def sharded(name: str, **options: Any) -> FSDPEngine:
    """The engine of one rank; nothing in it has memory."""
    engine = FSDPEngine(skeleton(name), "policy", **options)
    assert all(parameter.is_meta for parameter in engine.parameters.values())
    return engine


def shapes(engine: FSDPEngine) -> dict[str, tuple[int, ...]]:
    """The shapes of what a rank holds, by name of the parameter."""
    found = {}
    for name, parameter in engine.parameters.items():
        assert isinstance(parameter, DTensor)
        found[name] = tuple(parameter.to_local().shape)
    return found


def held_by(rank: int, count: int, name: str, **options: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of what a rank of a group holds."""
    with only_rank(rank, count):
        return shapes(sharded(name, **options))


def runs_of(rank: int, count: int, name: str, **options: Any) -> dict[str, list[tuple[int, int]]]:
    """First and last element of each run that a rank of a group holds."""
    with only_rank(rank, count):
        engine = sharded(name, **options)
        return {
            key: [
                (start, start + part.values.shape[1])
                for part in engine.parts("model", key)
                for start in part.starts.tolist()
            ]
            for key in engine.names()
        }


def elements(tensors: dict[str, tuple[int, ...]], name: str) -> int:
    """Elements of a model of all layers, of which `tensors` has two."""
    layers, _ = OF_ALL_LAYERS[name]
    sizes = {key: torch.Size(shape).numel() for key, shape in tensors.items()}
    of_layers = sum(size for key, size in sizes.items() if ".layers." in key)
    return sum(sizes.values()) + of_layers * (layers - LAYERS) // LAYERS


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("count", [8, 64])
def test_each_rank_holds_its_share(name: str, count: int) -> None:
    whole = {key: tuple(parameter.shape) for key, parameter in skeleton(name).named_parameters()}
    assert elements(whole, name) == pytest.approx(OF_ALL_LAYERS[name][1], rel=2e-3)  # papers round
    for rank in (0, count - 1):
        held = in_another_process(held_by, rank, count, name)
        assert held == {key: (shape[0] // count, *shape[1:]) for key, shape in whole.items()}
        assert elements(held, name) * count == elements(whole, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_groups_of_ranks_each_hold_all_of_it(name: str) -> None:
    """HSDP: eight machines with eight GPUs, each of which has the whole state."""
    whole = {key: tuple(parameter.shape) for key, parameter in skeleton(name).named_parameters()}
    for rank in (0, 7, 63):
        held = in_another_process(held_by, rank, 64, name, shard_size=8)
        assert held == {key: (shape[0] // 8, *shape[1:]) for key, shape in whole.items()}


@sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("count", "team", "shard_size"), [(8, 8, 8), (64, 8, 64), (64, 2, 64), (64, 8, 16)])
def test_teams_cut_each_matrix(name: str, count: int, team: int, shard_size: int) -> None:
    whole = {key: tuple(parameter.shape) for key, parameter in skeleton(name).named_parameters()}
    held = in_another_process(held_by, count - 1, count, name, tensor_parallel=team, shard_size=shard_size)
    teams = shard_size // team  # of a group that has all of it
    for key, shape in whole.items():
        if key.endswith(tuple(f"{matrix}.weight" for matrix in CUT)):
            rows, columns = shape
            by_rows = key.endswith(("o_proj.weight", "down_proj.weight"))
            expected = (rows // teams, columns // team) if by_rows else (rows // team // teams, columns)
            assert held[key] == expected, key
    # embeddings and norms may be whole in each team, and take little memory
    of_embeddings = 2 * whole["lm_head.weight"][0] * whole["lm_head.weight"][1] // teams
    assert elements(held, name) <= elements(whole, name) // shard_size + of_embeddings + 10**6


@sampled(3)
@pytest.mark.parametrize("team", [1, 2, 8])
def test_all_ranks_together_hold_each_element_once(team: int) -> None:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for rank in range(8):
        for key, runs in in_another_process(runs_of, rank, 8, "7 B", tensor_parallel=team).items():
            ranges.setdefault(key, []).extend(runs)
    for key, parameter in skeleton("7 B").named_parameters():
        ends = [0]
        for start, end in sorted(ranges[key]):
            assert start == ends[-1], key
            ends.append(end)
        assert ends[-1] == parameter.numel()
