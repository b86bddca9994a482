"""`model.kernels: liger` is refused before anything starts where it cannot work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ratchet.infra.execution.preflight.inputs import check_inputs
from ratchet.infra.execution.preflight.packages import check_packages
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.kernels import as_written, check_liger, compile_layers, layers
from ratchet.rlhf.models.loading import load_actor
from tests import tiny


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with Liger's names that knows Llama alone: the real one needs a GPU."""
    folder = tmp_path / "packages" / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "monkey_patch.py").write_text('MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}')
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    about = tmp_path / "packages" / "liger_kernel-0.8.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.8.2\n")
    yield
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        del sys.modules[name]


def test_liger_that_is_not_installed(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    pools = {"all": {"gpus_per_worker": 1}}
    with pytest.raises(UserError) as refused:
        check_packages(tiny.config(tmp_path, model__kernels="liger", pools=pools))
    fix = 'pip install "ratchet-rlhf[liger]"'
    assert str(refused.value) == f"model.kernels: liger needs the package liger_kernel: {fix}"


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_liger_without_a_gpu(tmp_path: Path, request: pytest.FixtureRequest, is_installed: bool) -> None:
    if is_installed:
        request.getfixturevalue("liger")
    tiny.workspace(tmp_path)
    with pytest.raises(UserError) as refused:
        check_inputs(tiny.config(tmp_path, model__kernels="liger"))
    fix = "set it to torch or compile"
    assert str(refused.value) == f"model.kernels is liger, which needs GPUs, but the trainers have none: {fix}"


@pytest.mark.usefixtures("liger")
def test_liger_and_another_architecture() -> None:
    check_liger("llama")
    with pytest.raises(UserError, match=r"^model.kernels is liger, which has no kernels for opt: set it to torch or"):
        check_liger("opt")


@pytest.mark.usefixtures("liger")
def test_liger_that_is_too_old(tmp_path: Path) -> None:
    (tmp_path / "packages" / "liger_kernel-0.8.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.8.1\n"
    )
    with pytest.raises(UserError, match=r"^model.kernels is liger, and liger-kernel 0.8.1 has wrong gradients"):
        check_liger("llama")


def test_generation_does_not_compile(tmp_path: Path) -> None:
    model = load_actor(ModelConfig(path=str(tiny.model_folder(tmp_path))))
    compile_layers(model)
    assert layers(model)
    torch._dynamo.reset()  # what this process compiled before would be used again
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), as_written(model):
        model(torch.arange(4)[None])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
