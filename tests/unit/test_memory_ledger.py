"""What takes the memory of a run's processes, what frees some, and which GPUs a run fits; on a simulated GPU, engines
are held to the same estimates (tests/contract/on_hollow.py)."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from benchmarks.engines import SIZES
from ratchet.flows.summary import COLUMNS, ledger_lines
from ratchet.rlhf.config import RunConfig, parse_config
from ratchet.rlhf.config.engines import TorchConfig
from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.distributed.gpus import KNOWN, GPUs, of_device
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.activation_memory import Computation, DecoderSizes
from ratchet.rlhf.rollout.memory_ledger import Models, ProcessMemory, check_fits_gpu, peak, savings
from tests.sizes import config_of
from tests.unit.test_config import MINIMAL

POOL = {"pools": {"gpus": {"workers": 8, "gpus_per_worker": 1}}}
FSDP, VLLM = {**POOL, "actor.engine": "fsdp"}, {"rollout.engine": {"type": "vllm", "gpu_memory_utilization": 0.6}}
RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("0.5 B", "rtx4090", {}),
    ("0.5 B", "rtx4090", VLLM),
    ("0.5 B", "l4", {"algorithm.advantage": "gae"}),
    ("0.5 B", "h100", {"actor.offload_when_idle": True, "rollout.engine": "vllm"}),
    ("7 B", "a100-40gb", FSDP),
    ("7 B", "h100x8", {**FSDP, **VLLM}),
    ("7 B", "h100x8", {**POOL, **VLLM}),
    ("7 B", "h100x8", {**POOL, **VLLM, "actor.engine": {"type": "deepspeed", "zero_stage": 1}}),
    ("7 B", "h100x8", {**FSDP, "actor.engine.shard_size": 2, "actor.engine.reshard_after_forward": False}),
    ("70 B", "h200x8", {**FSDP, **VLLM, "rollout.engine.tensor_parallel": 8}),
]


def run(model: str, changes: dict[str, Any]) -> tuple[RunConfig, Models]:
    tree = {**MINIMAL, "model": {"path": "m", "dtype": "bfloat16"}, "algorithm": {"advantage": "grpo"}}
    config = parse_config(tree, "tests").with_values(changes)
    found = {role: DecoderSizes.of(config_of(model), is_policy=ROLES[role].head == "policy") for role in config.models}
    sizes = {role: size for role, size in found.items() if size is not None}
    return config, Models({role: size.layers * size.layer + size.ends for role, size in sizes.items()}, sizes)


@pytest.mark.parametrize(("kernels", "measured"), [("torch", 27_685), ("compile", 21_930)])
def test_an_h100_took_what_the_formulas_say(kernels: str, measured: float) -> None:
    """`benchmarks/engines.py --size 1b`: selective checkpointing, one micro-batch of 16,384 packed tokens; MiB."""
    shape = dict(SIZES["1b"])
    heads = shape.pop("heads")
    model = LlamaConfig(vocab_size=32768, num_attention_heads=heads, num_key_value_heads=heads, **shape)
    sizes = DecoderSizes.of(model, is_policy=True)
    assert sizes is not None
    parameters = sizes.layers * sizes.layer + sizes.ends
    is_compiled = kernels == "compile"
    engine = Computation(sizes, TorchConfig(), 2, "selective", fused=is_compiled, compiled=is_compiled)
    held = sum(TorchConfig().held(parameters, parameters, 8 * parameters, 2, 1))
    update = engine.update(16384, 4 * parameters, several=False)
    assert (held + sum(update.values())) / 2**20 == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("model", "gpus", "changes"), RUNS, ids=str)
def test_each_setting_that_is_named_frees_what_it_says(model: str, gpus: str, changes: dict[str, Any]) -> None:
    config, models = run(model, changes)
    memory = GPUs.named(gpus).memory
    fullest = peak(config, models, memory)
    for typed, size in savings(config, models, memory):
        changed = config.with_values({}, [typed])
        phase = ProcessMemory(changed, models, fullest.pool, memory).phases()[fullest.phase]
        assert sum(phase.values()) == size < fullest.size, typed


@pytest.mark.parametrize(("model", "gpus", "changes"), RUNS, ids=str)
def test_a_ledger_is_short(model: str, gpus: str, changes: dict[str, Any]) -> None:
    lines = ledger_lines(*run(model, changes), GPUs.named(gpus).memory)
    assert len(lines) <= 10
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize(("model", "gpus", "changes"), RUNS, ids=str)
def test_what_does_not_fit_is_refused_with_settings_that_make_it_fit(
    model: str, gpus: str, changes: dict[str, Any]
) -> None:
    config, models = run(model, changes)
    named = GPUs.named(gpus)
    fullest = peak(config, models, named.memory)
    if fullest.size <= named.memory:
        check_fits_gpu(config, models, named)
        return
    with pytest.raises(UserError) as refused:
        check_fits_gpu(config, models, named)
    said = str(refused.value)
    assert said.startswith(f"{fullest.phase} takes {fullest.size / 1e9:.1f} GB in ")
    if "no setting" not in said:
        settings = said.partition(": set ")[2].partition(", which")[0].split(" ")
        check_fits_gpu(config.with_values({}, settings), models, named)


def test_the_arithmetic_of_a_refusal() -> None:
    config, models = run("0.5 B", VLLM)
    with pytest.raises(UserError) as refused:
        check_fits_gpu(config, models, GPUs.named("rtx4090"))
    assert str(refused.value) == (
        "update takes 33.4 GB in this process, but rtx4090 has 25.2 GB: set actor.offload_when_idle=true, which leaves "
        "6.9 GB free"
    )
    config, models = run("70 B", {})
    with pytest.raises(UserError, match=r"no setting makes it fit.*: ask for more or larger GPUs"):
        check_fits_gpu(config, models, GPUs.named("l4"))
    with pytest.raises(UserError, match=r"--gpu h100x2: no pool has GPUs: set pools\.NAME\.gpus_per_worker to 1"):
        check_fits_gpu(config.with_values({"pools": {"cpus": {}}}), models, GPUs.named("h100x2"))


def test_gpus_have_names() -> None:
    assert str(GPUs.named("h100x8")) == "h100x8"
    assert GPUs.named("rtx4090") == GPUs("rtx4090", 1)
    assert GPUs.named("rtx4090x2") == GPUs("rtx4090", 2)
    for unknown in ("h1000", "h100x", "h100x0", "x8", "8"):
        with pytest.raises(UserError, match=f"^--gpu {unknown} is unknown: name one of a10, a100-40gb, .*, rtx5090, "):
            GPUs.named(unknown)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_device_is_recognized(device: str, name: str) -> None:
    found = of_device(device)
    assert found is not None
    assert found.bf16_flops == KNOWN[name].bf16_flops


def test_an_unknown_device_is_not() -> None:
    assert of_device("simulated GPU") is None
