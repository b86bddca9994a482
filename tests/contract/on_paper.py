"""What benchmarks/paper.py counts, on a device that has shapes only; test_paper.py runs this elsewhere."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from benchmarks.paper import OBJECTIVE, Setup, counted, of_all_layers
from ratchet.rlhf.distributed.gpus import KNOWN
from ratchet.rlhf.models.skeleton import without_memory
from ratchet.rlhf.train.performance import TrainingFlops
from tests.contract.on_hollow import ledger_of
from tests.sizes import config_of


def in_processes(*runs: tuple[Setup, int]) -> list[dict[str, np.ndarray]]:
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(counted, runs, chunksize=1)


@pytest.mark.parametrize("model", ["8 B", "30 B"])
def test_flops_are_those_of_the_model(model: str) -> None:
    """Prompts are computed once, a token goes to some experts only, and attends to those before it."""
    prompt, responses = 100, np.array([[400, 300], [200, 600]])
    options = {"lengths": (prompt, responses), "objective": OBJECTIVE, "varlen": True, "counts": True}
    ledger = ledger_of(model, 0, 1, 2, engine="torch", gradient_checkpointing=False, **options)
    with without_memory():
        rates = TrainingFlops.of(AutoModelForCausalLM.from_config(config_of(model, 2)))
    read = responses - 1  # the last token predicts nothing
    tokens = 2 * prompt + read.sum()
    pairs = 2 * prompt**2 / 2 + (prompt * read + read**2 / 2).sum()
    training = rates.per_token * tokens + rates.per_response_token * responses.sum() + rates.per_pair * pairs
    head = rates.per_response_token * responses.sum() / 3  # in an update, its logits are computed twice
    for phase, expected in (("log-probs", training / 3), ("update", training + head)):
        flops = sum(count * flops for (flops, _), count in ledger.phases[phase].operations.items())
        # and so are the scores of attention
        assert flops == pytest.approx(expected, rel=0.01), phase


def test_a_rank_receives_the_weights_of_the_others() -> None:
    setup = Setup("8 B", 8, 100, np.full((8, 1), 400), 1)
    [phases] = in_processes((setup, 1))
    parameters = setup.sizes.layer + setup.sizes.ends
    assert phases["weights"][1] == pytest.approx(7 / 8 * 2 * parameters / KNOWN["h100"].to_gpus, rel=0.01)
    [away, back] = (phases[name][2] for name in ("away", "back"))
    assert [away, back] == pytest.approx(2 * [12 * parameters / 8 / KNOWN["h100"].to_host], rel=0.01)


def test_two_layers_tell_what_all_take() -> None:
    """So that no row needs a run with all layers."""
    setup = Setup("30 B", 16, 100, np.full((16, 2), 400), 1)
    one, two, five = in_processes(*((setup, layers) for layers in (1, 2, 5)))
    for name, found in of_all_layers(one, two, 5).items():
        # small tensors at the ends of a rank's share are cut elsewhere
        assert found == pytest.approx(five[name], rel=1e-3), name
