"""Runs with several teachers: each is asked about the prompts of its data sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from ratchet.flows.train import train
from ratchet.infra.execution.driver import check_start
from ratchet.infra.runs.run import open_run
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.train.engine import InferencePlan
from ratchet.tasks.fingerprints import check_open_iteration
from tests import tiny
from tests.history import History
from tests.integration.test_distillation_run import top_tokens

SOURCES = ("math/easy", "math/hard", "code")
OUTPUTS = ("log_probs", "topk_ids", "topk_log_probs", "tail_log_probs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace whose prompts have three data sources, with two teachers that prefer other tokens by far."""
    folder = tiny.workspace(tmp_path_factory.mktemp("teachers"))
    table = pq.read_table(folder / "prompts.parquet")
    sources = pa.array([SOURCES[row % len(SOURCES)] for row in range(len(table))])
    pq.write_table(
        table.set_column(table.column_names.index("data_source"), "data_source", sources), folder / "prompts.parquet"
    )
    for seed, name in enumerate(("math", "code"), start=5):
        made = tiny.model_folder(folder / name, hidden=16, seed=seed)
        weights = load_file(made / "model.safetensors")
        weights["lm_head.weight"] *= 30
        weights["model.embed_tokens.weight"][:] = weights["model.embed_tokens.weight"][seed].clone()
        save_file(weights, made / "model.safetensors", {"format": "pt"})
    return folder


def config_of(folder: Path, store: Path, models: dict[str, Any], **changes: Any) -> RunConfig:
    settings = {
        "teacher": {"models": models, "top_k": 5},
        "reward": {"function": None},
        "algorithm__kl": {},
        "algorithm__advantage": {"type": "none"},
        "algorithm__distillation": {"divergence": "forward_kl"},
        "rollout__n": 4,
        **changes,
    }
    return tiny.config(folder, run__store=f"file://{store}", **settings)


def model(folder: Path, name: str) -> dict[str, str]:
    return {"path": str(folder / name), "dtype": "float32"}


def test_each_teacher_is_asked_about_its_data_sources(folder: Path, tmp_path: Path, prefect_server: str) -> None:
    models = {"math/*": model(folder, "math"), "*": model(folder, "code")}
    config = config_of(folder, tmp_path, models, actor__lr=1e-2, train__iterations=6)
    train(config)
    History.of(config).check_sound()
    run = open_run(f"file://{tmp_path}/tiny")
    distances = run.metrics()["actor/distillation_loss"].tolist()
    assert distances[-1] < distances[0] / 2, distances
    rows = run.trajectories(0)
    assert set(rows["data_source"]) == set(SOURCES)
    for name, own in rows.groupby(rows["data_source"].map(lambda source: source.partition("/")[0])):
        for row, (ids, log_probs, rest) in zip(own.to_dict("records"), top_tokens(folder / name, own), strict=True):
            assert row["teacher_topk_ids"].reshape(-1, 5).tolist() == ids.tolist()
            np.testing.assert_allclose(row["teacher_topk_log_probs"].reshape(-1, 5), log_probs, atol=1e-4)
            np.testing.assert_allclose(row["teacher_tail_log_probs"], rest, atol=1e-4)


def test_one_is_on_the_device_at_a_time_if_models_take_turns(folder: Path, tmp_path: Path) -> None:
    """And the numbers are those of teachers side by side, to the bit."""
    models = {"math/*": model(folder, "math"), "code": model(folder, "code")}
    generator = np.random.default_rng(0)
    batch = TrajectoryBatch.of(
        {
            "prompt_ids": [generator.integers(3, 70, 6).tolist() for _ in range(7)],
            "response_ids": [generator.integers(3, 70, 1 + row).tolist() for row in range(7)],
            "data_source": [SOURCES[row % 3] for row in range(7)],
        }
    )
    plan = InferencePlan(OUTPUTS, 1.0, 512, 5)
    found = {}
    for turns in (False, True):
        engines = Engines(config_of(folder, tmp_path, models, actor__offload_when_idle=turns), {"teacher"})
        found[turns] = engines.inference("teacher").infer_each([batch, batch.take([0]), batch.take([])], plan)
    for alone, together in zip(*found.values(), strict=True):
        assert all(alone[name].equals(together[name]) for name in OUTPUTS)
    [whole, first, empty] = found[True]
    assert {name: len(column) for name, column in empty.items()} == dict.fromkeys(OUTPUTS, 0), (
        "selection can leave none"
    )
    assert first["topk_ids"][0].as_py() == whole["topk_ids"][0].as_py()
    assert torch.is_grad_enabled()


def test_a_prompt_without_a_teacher_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path, {"math/hard": model(folder, "math")})
    with pytest.raises(UserError) as refused:
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)
    assert str(refused.value).splitlines() == [
        f"{folder}/prompts.parquet, row 1: data_source math/easy has no teacher: add math/easy or * to teacher.models",
        f"{folder}/prompts.parquet, row 3: data_source code has no teacher: add code or * to teacher.models",
    ]


def test_another_vocabulary_names_the_teacher_that_has_it(folder: Path, tmp_path: Path) -> None:
    other = tiny.model_folder(tmp_path / "other", letters=tiny.LETTERS[::-1])
    config = config_of(folder, tmp_path, {"math/*": model(folder, "math"), "*": {"path": str(other)}})
    says = r"teacher.models.\* .*other has another vocabulary .* or set teacher.models.\*.align=text"
    with pytest.raises(UserError, match=says):
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)
