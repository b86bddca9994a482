"""Files that were damaged, deleted or planted: named, and never trained on."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from ratchet.flows.train import train
from ratchet.infra.runs.query import query
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.log import Corrupt
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes
from tests.tiers import sampled


def run_config(workspace: Path, store: Path) -> RunConfig:
    return tiny.config(
        workspace,
        run__name="damaged",
        run__store=f"file://{store}",
        reward__function="tests.rewards:letters",
        train__iterations=1,
    )


@pytest.fixture(scope="module")
def interrupted(workspace: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A run that died before its advantages."""
    folder = tmp_path_factory.mktemp("interrupted")
    processes = Processes(folder)
    config = run_config(workspace, folder / "runs")
    fault = Fault("put", "trajectories/advantages/iteration=000000/", "before")
    assert processes.train(config, fault).wait() == -9
    processes.close()
    return folder / "runs"


@pytest.fixture
def config(interrupted: Path, workspace: Path, tmp_path: Path) -> RunConfig:
    shutil.copytree(interrupted, tmp_path / "runs")
    return run_config(workspace, tmp_path / "runs")


def shard(config: RunConfig, stage: str) -> Path:
    folder = Path(config.run.store.removeprefix("file://")) / "damaged" / "trajectories" / stage
    return sorted(folder.rglob("*.parquet"))[1]


@sampled(9)
@pytest.mark.parametrize("stage", ["generate", "score", "old_log_probs"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_a_damaged_shard_is_named_and_never_trained_on(config: RunConfig, stage: str, damage: str) -> None:
    path = shard(config, stage)
    data = bytearray(path.read_bytes())
    if damage == "deleted":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if damage == "truncated" else data)
    with pytest.raises(Corrupt, match=f"trajectories/{stage}/iteration=000000/.*{path.name} is (gone|damaged)"):
        train(config)
    history = History.of(config)
    assert "advantages" not in history.state.stages
    assert history.state.weights == history.state.starting, "nothing was learned"


@pytest.mark.promise
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_a_query_that_meets_damage_says_where(config: RunConfig, damage: str) -> None:
    path = shard(config, "score")
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    run = open_run(f"{config.run.store}/damaged")
    assert len(query(run, "select * from generate")) == 8, "what it does not read may be damaged"
    with pytest.raises(UserError, match=f"{path.name}.*`ratchet verify` lists all damage; tables are"):
        query(run, "select * from score")


@pytest.mark.promise
def test_a_planted_pickle_is_never_opened(config: RunConfig, tmp_path: Path) -> None:
    """Where a shard, a manifest and a checkpoint belong; opening one would leave a trace."""
    trace = tmp_path / "opened"
    bomb = pickle.dumps(_Bomb(str(trace)))
    folder = Path(config.run.store.removeprefix("file://")) / "damaged"
    for place in (
        "checkpoints/actor/000001.9-0/optimizer.pt",
        "trajectories/score/iteration=000000/x.pkl",
        "forks/x.json.pkl",
    ):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(bomb)
    shard(config, "score").write_bytes(bomb)
    with pytest.raises(Corrupt, match="is damaged"):
        train(config)
    (folder / "log/tail.json").write_bytes(bomb)
    with pytest.raises(Corrupt, match="is damaged"):
        train(config)
    assert not trace.exists()


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


@pytest.mark.promise
@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 101, "a b", "a\nb"])
def test_names_that_lead_elsewhere_are_refused(name: str, workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.name"):
        run_config(workspace, tmp_path).with_values({"run.name": name})
