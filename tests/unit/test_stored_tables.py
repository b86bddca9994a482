"""The files of a run's stages, read by programs that know nothing of Ratchet: pandas, polars, DuckDB and datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.flows.commands import tables
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.records import SCHEMA_VERSION
from ratchet.rlhf.schema import TRAJECTORY
from ratchet.tasks.pipeline import STAGES
from ratchet.tasks.stage import RowsStage
from tests.stored import STORED

FOLDERS = sorted((STORED / "run" / "trajectories").iterdir())
BY_ID = "trajectory_id"


@pytest.fixture(scope="module")
def run() -> Run:
    return open_run(f"file://{STORED}/run")


def with_datasets(folder: Path, cache: Path) -> list[dict[str, Any]]:
    found = datasets.load_dataset("parquet", data_dir=str(folder), split="train", cache_dir=str(cache))
    return list(found)


def with_pandas(folder: Path, _: Path) -> list[dict[str, Any]]:
    frame = pd.read_parquet(folder).drop(columns="iteration")
    return pa.Table.from_pandas(frame, preserve_index=False).to_pylist()


def with_polars(folder: Path, _: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(folder).drop("iteration").to_dicts()


def with_duckdb(folder: Path, _: Path) -> list[dict[str, Any]]:
    read = f"from read_parquet('{folder}/*/*.parquet', hive_types={{'iteration': int}}) select * exclude (iteration)"
    return duckdb.sql(read).to_arrow_table().to_pylist()


@pytest.mark.parametrize("read", [with_datasets, with_pandas, with_polars, with_duckdb])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stage_is_read_by(folder: Path, read: Callable[[Path, Path], list[dict[str, Any]]], tmp_path: Path) -> None:
    stored = pa.concat_tables(pq.ParquetFile(file).read() for file in folder.glob("*/*.parquet")).to_pylist()
    assert sorted(read(folder, tmp_path), key=lambda row: row[BY_ID]) == sorted(stored, key=lambda row: row[BY_ID])
    assert stored


def test_all_stages_at_once_are_refused(tmp_path: Path) -> None:
    folder = STORED / "run" / "trajectories"
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        with_datasets(folder, tmp_path)
    with pytest.raises(pl.exceptions.SchemaError):
        pl.read_parquet(folder)
    with pytest.raises(duckdb.InvalidInputException):
        duckdb.sql(f"from read_parquet('{folder}/*/*/*.parquet')").fetchall()


def test_folders_are_as_spark_wants_them() -> None:
    """Spark finds columns in folders called name=value. They may not be columns of the files, or differ in depth, and
    names of columns that differ in case are the same (spark.sql.caseSensitive is false)."""
    for folder in FOLDERS:
        assert "=" not in folder.name, "it would be a column, and the stages one table"
        for file in folder.rglob("*.parquet"):
            name, _, value = file.parent.name.partition("=")
            assert (name, int(value) in (0, 1), file.parent.parent) == ("iteration", True, folder)
            assert not file.name.startswith(("_", ".")), "Spark would not see it"
            columns = [column.lower() for column in pq.read_schema(file).names]
            assert len({*columns, "iteration"}) == len(columns) + 1


def test_a_file_says_where_it_comes_from() -> None:
    for folder in FOLDERS:
        for file in folder.rglob("*.parquet"):
            origin = json.loads(pq.read_schema(file).metadata[b"ratchet"])
            iteration = int(file.parent.name.removeprefix("iteration="))
            place = {"run": "run", "stage": folder.name, "iteration": iteration}
            assert origin == {**place, "schema_version": SCHEMA_VERSION}
            read = pl.read_parquet_metadata(file)["ratchet"]
            [(value,)] = duckdb.sql(
                f"select decode(value) from parquet_kv_metadata('{file}') where decode(key) = 'ratchet'"
            ).fetchall()
            assert json.loads(read) == json.loads(value) == origin


def test_no_stage_writes_maps() -> None:
    def kinds(kind: pa.DataType) -> list[pa.DataType]:
        return [kind, *(inner for index in range(kind.num_fields) for inner in kinds(kind.field(index).type))]

    columns = [
        *TRAJECTORY.columns,
        *(column for stage in STAGES if isinstance(stage, RowsStage) for column in stage.writes),
    ]
    assert not [column.name for column in columns if any(map(pa.types.is_map, kinds(column.type)))]


def test_parts_of_rewards_are_dictionaries_and_maps(run: Run, tmp_path: Path) -> None:
    frame = run.trajectories(columns=["trajectory_id", "reward_parts", "model_score", "agent_parts"])
    assert [parts["model"] for parts in frame["reward_parts"]] == frame["model_score"].tolist()
    assert frame["agent_parts"].isna().all(), "there is no agent"
    found = run.query("select reward_parts['model'] as part, reward_parts from trajectories order by trajectory_id")
    assert found["part"].tolist() == frame.sort_values(BY_ID)["model_score"].tolist()
    assert found["reward_parts"].tolist() == frame.sort_values(BY_ID)["reward_parts"].tolist()
    assert run.query("select count(*) as n from score where reward_parts['none'] is null")["n"][0] == 16
    tables.write(frame[["trajectory_id", "reward_parts"]], tmp_path / "answers.parquet")
    [first, *_] = pq.read_table(tmp_path / "answers.parquet")["reward_parts"].to_pylist()
    assert first == [{"name": "model", "value": frame["model_score"][0]}]
