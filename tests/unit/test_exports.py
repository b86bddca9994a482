"""Exported folders hold the weights of one export, whatever was there before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.manifest import Checkpoint
from ratchet.infra.store.records import Claim, Snapshot, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.models.model_folders import initial_digest
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests import tiny

IDS = torch.tensor([[5, 9, 30, 31, 7]])
STALE = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a snapshot of adapters that change what the model says."""
    root = tmp_path_factory.mktemp("adapted")
    tiny.model_folder(root / "model")
    config = tiny.config(root, model__lora={"r": 4, "alpha": 8})
    store = RunStore.at(f"{config.run.store}/tiny")
    first = Weights(version=0, digest=initial_digest(config.model, config.run.seed))
    tree = config.model_dump(mode="json")
    store.log.claim(Claim(config=tree, code="", packages={}, threads=1, host="here", initial={"actor": first}))
    store.sweep(["generate"])
    engine = TorchEngine(load_actor(config.model), "policy")
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    trained = Weights(version=1, digest=engine.digest())
    folder = store.checkpoint_folder("actor", trained)
    files = store.write_checkpoint_files(folder, engine.state())
    written = store.write_checkpoint_manifest(folder, Checkpoint(role="actor", weights=trained, files=files))
    store.close({"actor/loss": 0.0}, Snapshot(version=1, roles={"actor": written}))
    return open_run(store.url)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize("adapter_is_last", [True, False])
def test_adapters_count_once(adapted: Run, tmp_path: Path, adapter_is_last: bool) -> None:
    merged = logits(adapted.export(1, tmp_path / "merged"))
    assert (merged - logits(Path(adapted.config.model.path))).abs().max() > 1e-3
    folder = tmp_path / "both"
    folder.mkdir()
    for name in (*STALE, "other.safetensors"):
        (folder / name).write_bytes(b"{}")
    for adapter in (not adapter_is_last, adapter_is_last):
        adapted.export(1, folder, adapter=adapter)
    torch.testing.assert_close(logits(folder), merged, rtol=1e-5, atol=1e-5)
    left = {path.name for path in folder.iterdir()}
    assert not left & set(STALE)
    assert "other.safetensors" in left, "nobody would load it"


def test_an_export_never_replaces_the_model_that_a_run_started_from(adapted: Run) -> None:
    with pytest.raises(UserError, match="is the model that the run started from: name another folder"):
        adapted.export(1, adapted.config.model.path)
