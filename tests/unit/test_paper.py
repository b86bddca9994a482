"""The costs on paper: what is computed by hand for small numbers, and what is counted on a device without memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import paper
from benchmarks.paper import HOST_S, IPC, MEASURED, PAGEABLE, SIZES, SLOWER, Setup
from ratchet.rlhf.distributed.gpus import KNOWN
from tests.contract.test_simulated_gpu import compiles, run

ROOT = Path(paper.__file__).parents[1]
DOCS = (ROOT / "docs/benchmarks.md").read_text()
H100 = KNOWN["h100"]


def test_a_collective_is_bounded_by_links_in_a_machine_and_by_nics_between_machines() -> None:
    assert paper.sent("all_gather of 8", 450, 450.0) == 7
    assert paper.sent("reduce_scatter of 8", 8 * 450, 450.0) == 7
    assert paper.sent("all_reduce of 8", 4 * 450, 450.0) == 7
    assert paper.sent("all_gather of 1", 450, 450.0) == 0
    half_through_8_nics = paper.sent("all_gather of 16", 50_000_000_000, 1e15)
    assert half_through_8_nics == 1
    assert paper.sent("all_gather of 16", 50_000_000_000, 350e9) == 2, "the links in a machine are slower"


def test_lengths_have_the_mean_after_the_limit() -> None:
    responses = paper.drawn(64, 8, 900, 1000)
    assert (responses.shape, responses.max()) == ((64, 8), 1000)
    assert responses.mean() == pytest.approx(900, rel=0.01)


def test_a_step_of_generation_reads_weights_and_the_keys_and_values_of_all_that_run() -> None:
    setup = Setup("8 B", 2, 10, np.array([[4, 2], [3, 1]]))
    seconds, loading = paper.generation(setup, flops=0)
    weights, cached = 2 * setup.parameters, 32 * 2 * 8 * 128 * 2
    running = [(4, 10), (3, 11), (2, 12), (1, 13)]
    read = 4 * weights + sum(count / 2 * tokens for count, tokens in running) * cached
    assert seconds == pytest.approx(read / H100.bandwidth)
    assert loading == weights / IPC
    [prefill, _] = np.array(paper.generation(setup, flops=1e9)) - (seconds, loading)
    assert prefill == pytest.approx(2 * 10 * 1e9 / (2 * H100.bf16_flops))


def test_many_small_requests_wait_for_the_host() -> None:
    seconds, _ = paper.generation(Setup("0.5 B", 1, 10, np.full((128, 8), 5)), flops=0)
    assert seconds == pytest.approx(5 * 1024 * HOST_S)


def test_an_engine_spans_as_many_gpus_as_its_weights_need() -> None:
    one = np.array([[1]])
    assert paper.generation(Setup("32 B", 2, 0, one), 0)[0] == pytest.approx(
        2 * Setup("32 B", 2, 0, one).parameters / (2 * H100.bandwidth)
    )
    setup = Setup("70 B", 8, 0, one)
    assert paper.generation(setup, 0)[1] == 2 * setup.parameters / PAGEABLE


def test_layers_are_recomputed_if_a_micro_batch_does_not_fit_otherwise() -> None:
    chosen = {str(setup): setup.engine["gradient_checkpointing"] for setup in SIZES}
    assert chosen == {"8 B on 8": None, "32 B on 32": True, "70 B on 64": True, "235 B on 128": True}


def test_the_range_is_that_of_the_measured_iterations() -> None:
    factors = [round(float(factor), 1) for factor in re.findall(r"\| iteration \|.*\*\*([\d.]+)\*\* \|", DOCS)]
    assert len(factors) == sum("iteration" in found for _, _, found in MEASURED)
    assert (min(factors), max(factors)) == SLOWER


def check(*options: str) -> None:
    """Runs the command, and checks that the documentation has what it prints."""
    command = [sys.executable, "benchmarks/paper.py", *options]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) > 2
    for line in lines:
        assert line in DOCS, "run benchmarks/paper.py, and copy what it prints to docs/benchmarks.md"


@pytest.mark.slow
@compiles
def test_the_docs_have_what_the_command_prints() -> None:
    check("--only", "1.2 B on 1")


@compiles
@pytest.mark.slow
def test_the_docs_have_all_that_the_command_prints() -> None:
    check()


@compiles
@pytest.mark.slow
def test_what_is_counted() -> None:
    run("tests/contract/on_paper.py")
