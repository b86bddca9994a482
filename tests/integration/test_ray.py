"""Runs whose models live in worker groups on Ray: two nodes on this machine, and processes that are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from ratchet.infra.store.log import Fenced
from ratchet.infra.store.object_store import StoreUnavailable
from ratchet.infra.store.records import Snapshot, Weights
from ratchet.infra.workers.calls import Call, RowsCall
from ratchet.infra.workers.ray_group import GroupLost, RayGroup
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.models.model_folders import parameter_count
from ratchet.rlhf.stage_config import StageConfig
from tests import tiny
from tests.extras import EXTRAS, needs
from tests.history import History
from tests.processes import Child, Fault, Processes
from tests.ranks import one_rank_fails, one_rank_never_answers, variable
from tests.served import end_servers
from tests.vllm_server import serving

pytestmark = needs("ray")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    """The address of a Ray of two nodes, one CPU each; it outlives every driver."""
    from ray.cluster_utils import Cluster

    here = Path(__file__).parents[1]
    on_cpu = [str(here / "on_cpu"), str(here.parent), os.environ.get("PYTHONPATH")]
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 * 2**20}
    system = {"memory_monitor_refresh_ms": 0}  # the tests beside these may need the memory: Ray kills no worker for it
    head = {**options, "include_dashboard": False, "_system_config": system}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, on_cpu)))
        patched.setenv("RAY_worker_niceness", "0")  # by default, 15: whatever runs beside these tests would starve them
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**options)
    os.environ["RAY_ADDRESS"] = cluster.address
    yield cluster.address
    del os.environ["RAY_ADDRESS"]
    cluster.shutdown()


class Runs:
    """`ratchet` on Ray; what it leaves there is ended with `ratchet stop`, so that the next run has room."""

    def __init__(self, workspace: Path, processes: Processes) -> None:
        self.workspace, self.processes = workspace, processes

    def config(self, name: str, **changes: Any) -> RunConfig:
        defaults: dict[str, Any] = {
            "run__name": name,
            "run__store": f"file://{self.processes.folder}/runs",
            "reward__function": "tests.rewards:letters",
            "pools": {"train": {"workers": 2}},  # a node each
            "actor__engine": "fsdp",
            "critic__engine": "deepspeed",
        }
        return tiny.config(self.workspace, **defaults | changes)

    def train(self, config: RunConfig, *faults: Fault) -> Child:
        path = self.processes.folder / f"{config.run.name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return self.processes.cli("train", path, faults=faults)

    def finish(self, config: RunConfig, *faults: Fault) -> History:
        child = self.train(config, *faults)
        assert child.wait() == 0, child.text
        stopped = self.processes.cli("stop", config.run.name, "--store", config.run.store)
        assert stopped.wait() == 0, stopped.text
        assert "its workers on Ray have ended" in stopped.text
        history = History.of(config)
        history.check_sound()
        return history


@pytest.fixture
def runs(workspace: Path, processes: Processes, ray_cluster: str) -> Runs:
    return Runs(workspace, processes)


def computing() -> list[psutil.Process]:
    """The processes of this test's Ray that hold our models."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found += [process] if "ray::Process" in str(process.cmdline()) else []
    return found


def processes_of_vllm() -> tuple[psutil.Process, list[psutil.Process]]:
    """The process in which vLLM is, and its worker processes."""
    lines = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            lines.append((process, " ".join(process.cmdline())))
    [child] = [process for process, line in lines if "ratchet.rlhf.rollout.vllm_process" in line]
    return child, [process for process, line in lines if "VLLM::Worker" in line]


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def gap(history: History) -> float:
    """Between what the rollout and the actor find, over all tokens."""
    frame = history.run.trajectories()
    gaps = (frame["rollout_log_probs"] - frame["old_log_probs"]).map(lambda row: np.abs(row).max())
    return float(gaps.max())


def until(true: Any, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_drivers_and_workers_that_are_killed_leave_no_trace(runs: Runs) -> None:
    expected = runs.finish(runs.config("quiet"))
    assert expected.state.iteration == 3
    wrote = expected.results["checkpoints"]["actor"]
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} <= wrote.keys(), "two ranks"
    assert gap(expected) < 1e-4, "the rollout's copy is the actor as it is"

    # the driver dies: the next one finds the models where they are
    config = runs.config("driver", checkpoint__background=True)
    killed = runs.train(config, Fault("create", '{"kind":"shard","iteration":0,"stage":"old_log_probs"'))
    assert killed.wait() == -signal.SIGKILL, killed.text
    assert "starting pool train" in killed.text
    history = History.of(config)
    assert list(history.run.store.committed_shards("old_log_probs", 0)) == [0]
    assert len(list(runs.processes.folder.glob("runs/driver/trajectories/old_log_probs/iteration=000000/*"))) == 2, (
        "the ranks computed both shards together; the next driver has only the second one to compute"
    )
    killed = runs.train(config, Fault("create", '{"kind":"stage","iteration":1,"stage":"update_critic"'))
    assert killed.wait() == -signal.SIGKILL, killed.text
    assert "starting pool" not in killed.text
    held = {process.pid for process in computing()}
    assert len(held) == 2
    resumed = runs.train(config)
    assert resumed.wait() == 0, resumed.text
    assert "starting pool" not in resumed.text
    assert "replaying" not in resumed.text, "the workers were where the log is"
    assert {process.pid for process in computing()} == held
    history = runs.finish(config)
    until(lambda: not computing())
    assert history.results == expected.results
    assert history.stages == expected.stages

    # a worker dies: its group restarts from what is committed
    config = runs.config("worker")
    child = runs.train(config, Fault("put", "manifests/iteration=000001/generate", "before", delay_s=10.0))
    until(lambda: "waiting at" in child.text)
    computing()[-1].kill()
    assert child.wait() == 0, child.text
    assert child.text.count("starting pool train") == 2
    history = runs.finish(config)
    assert history.results == expected.results
    assert history.state.term == 2, "the first driver came through; the second found the run done"


def test_a_driver_that_is_asked_to_stop_finishes_its_work(runs: Runs) -> None:
    """It has more than the 3 s that the handler leaves it which Ray installs in the first iteration."""
    config = runs.config("asked", critic__engine="fsdp")
    child = runs.train(config, Fault("put", "manifests/iteration=000000/generate", "before", delay_s=6.0))
    until(lambda: "waiting at" in child.text)
    child.signal(signal.SIGTERM)
    assert child.wait() == 1, child.text
    assert "continues from the last commit" in child.text
    assert ("generate", 0) in History.of(config).stages
    runs.finish(config)


def test_a_run_that_changed_to_megatron_is_killed_and_resumed(runs: Runs) -> None:
    """Two workers share matrices, first by FSDP2. They are killed, and then their driver: the results stay the same."""
    grpo: dict[str, Any] = {
        "algorithm__advantage": "grpo",
        "actor__engine__tensor_parallel": 2,
        "algorithm__kl__in_reward": None,
        "algorithm__kl__in_loss": 0.1,
    }
    by_fsdp = grpo | {"train__iterations": 1}
    by_megatron = grpo | {"train__iterations": 2, "actor__engine": "megatron"}
    runs.finish(runs.config("split", **by_fsdp))
    expected = runs.finish(runs.config("split", **by_megatron))
    assert gap(expected) < 1e-4, "the rollout's copy is the actor as it is"
    runs.finish(runs.config("split-killed", **by_fsdp))
    config = runs.config("split-killed", **by_megatron)
    child = runs.train(
        config,
        Fault("put", "manifests/iteration=000001/generate", "before", delay_s=10.0),
        Fault("create", '{"kind":"stage","iteration":1,"stage":"update_actor"'),
    )
    until(lambda: "waiting at" in child.text)
    for process in computing():
        process.kill()
    assert child.wait() == -signal.SIGKILL, child.text
    assert child.text.count("starting pool train") == 2
    history = runs.finish(config)
    assert (history.results, history.stages) == (expected.results, expected.stages)


def test_a_rollout_in_a_pool_of_its_own_gets_the_newest_weights_from_the_actor(runs: Runs, tmp_path: Path) -> None:
    """A reward model beside it. No snapshot is taken before the last iteration."""
    judge = tiny.reward_model_folder(tmp_path / "judge", runs.workspace / "model")
    changes: dict[str, Any] = {
        "pools": {"train": {"workers": 1}, "answers": {"workers": 1}},
        "placement": {
            "actor": "train",
            "critic": "train",
            "reference": "train",
            "rollout": "answers",
            "reward": "answers",
        },
        "reward": {"function": "tests.rewards:letters", "model": {"path": str(judge), "dtype": "float32"}},
        "actor__engine": "torch",
        "critic__engine": "torch",
        "actor__lr": 0.01,
        "rollout__prompts_per_shard": 1,
        "checkpoint__every": 10,
    }
    # a generation is not over before the first of its shards has gone on to the other pool
    first = r'"kind":"shard","iteration":\1,"stage":"old_log_probs","shard":0'
    history = runs.finish(
        runs.config("apart", **changes),
        Fault("put", r"manifests/iteration=0*([12])/generate\.", "before", count=0, until=first),
    )
    frame = history.run.trajectories()
    assert frame["policy_version"].tolist() == frame["iteration"].tolist()
    assert frame["model_score"].nunique() > len(frame) / 2
    assert gap(history) < 1e-4, "the actor finds what the rollout found, in float32"
    moved = (frame["old_log_probs"] - frame["ref_log_probs"]).map(lambda row: np.abs(row).max())
    assert moved[frame["iteration"] == 2].max() > 1e-2, "and it has moved"
    assert [commit.version for commit in history.commits(Snapshot)] == [3]
    sent = history.run.metrics().set_index("iteration")["perf/weight_sync_bytes"]
    parameters = 4 * parameter_count(runs.workspace / "model")
    assert sent.loc[[1, 2]].tolist() == [parameters, parameters], "each byte of the model once"

    # both pools die: the actor replays its updates, and the rollout gets the result over a new connection
    child = runs.train(
        runs.config("torn", **changes), Fault("put", "manifests/iteration=000002/generate", "before", delay_s=10.0)
    )
    until(lambda: "waiting at" in child.text)
    for process in computing():
        process.kill()
    assert child.wait() == 0, child.text
    assert child.text.count("starting pool") == 4
    assert "through the store" not in child.text
    assert runs.finish(runs.config("torn", **changes)).results == history.results


@needs("vllm")
def test_one_vllm_spans_the_devices_of_two_ranks(runs: Runs, tmp_path: Path) -> None:
    """It outlives the driver, and neither it nor its workers outlive a process that is killed."""
    model = tiny.model_folder(tmp_path / "model", hidden=64, heads=2, key_value_heads=2)
    config = runs.config(
        "spans",
        pools={"train": {"workers": 2, "cpus_per_worker": 0.5}},  # both on one node
        critic__engine="fsdp",
        model__path=str(model),
        rollout__engine={"type": "vllm", "tensor_parallel": 2},
        actor__lr=1e-2,
        actor__offload_when_idle=True,
        critic__offload_when_idle=True,
    )
    killed = runs.train(config, Fault("create", '{"kind":"stage","iteration":1,"stage":"update_critic"'))
    assert killed.wait() == -signal.SIGKILL, killed.text
    assert "starting pool train: 1 x 1 CPU, each on one machine (2 workers share a vLLM" in killed.text
    child, workers = processes_of_vllm()
    assert len(workers) == 2
    assert not any(has_ended(process) for process in [child, *workers]), "the next driver finds it"

    resumed = runs.train(config, Fault("put", "manifests/iteration=000001/", "before", delay_s=10.0))
    until(lambda: "waiting at" in resumed.text)
    child.kill()
    until(lambda: all(has_ended(process) for process in workers))
    assert resumed.wait() == 0, resumed.text
    assert "starting pool" not in resumed.text
    _, new = processes_of_vllm()
    assert len(new) == 2
    history = runs.finish(config)
    until(lambda: all(has_ended(process) for process in new))
    frame = history.run.trajectories()
    assert frame["policy_version"].tolist() == frame["iteration"].tolist()
    assert gap(history) < 1e-3, "in float32, before and after updates"
    moved = (frame["old_log_probs"] - frame["ref_log_probs"]).map(lambda row: np.abs(row).max())
    assert moved[frame["iteration"] == 2].max() > 0.05, "or stale weights would not be noticed"


@needs("vllm")
def test_a_server_gets_the_weights_of_an_actor_on_two_ranks(runs: Runs, tmp_path: Path) -> None:
    model = tiny.model_folder(tmp_path / "model", hidden=64, heads=2, key_value_heads=1)
    try:
        url, weights = serving(model), tmp_path / "weights"
        config = runs.config(
            "served",
            model__path=str(model),
            rollout__engine={"type": "server", "urls": [url], "weights_folder": str(weights)},
        )
        assert gap(runs.finish(config)) < 1e-3
        assert not list(weights.iterdir()), "nothing is left behind"
    finally:
        end_servers()


def test_a_pool_that_does_not_fit_is_refused(runs: Runs) -> None:
    config = runs.config("large", pools={"train": {"workers": 1, "gpus_per_worker": 64}})
    child = runs.train(config)
    child.process.join(1)
    refused = child.wait()
    assert refused == 2, child.text
    assert "pools.train asks for 1 x 1 CPU and 64 GPUs, and Ray has 2 CPUs and no GPU, some of it in use" in child.text
    typed = runs.train(runs.config("typed", pools={"train": {"accelerator_type": "H100"}}))
    assert typed.wait() == 2, typed.text
    assert "asks for 1 x 1 CPU and accelerator_type H100, and Ray has 2 CPUs and no accelerator_type H100" in typed.text


@needs("vllm")
def test_two_workers_that_share_an_engine_want_one_machine(runs: Runs, tmp_path: Path) -> None:
    """There are two CPUs, but on two machines."""
    model = tiny.model_folder(tmp_path / "model", hidden=64, heads=2, key_value_heads=2)
    vllm = {"model__path": str(model), "rollout__engine": {"type": "vllm", "tensor_parallel": 2}}
    straddles = runs.train(runs.config("straddles", pools={"train": {"workers": 2}}, **vllm))
    assert straddles.wait() == 2, straddles.text
    assert "asks for 1 x 2 CPUs, each on one machine (2 workers share" in straddles.text


def test_a_pool_has_a_runtime_environment(runs: Runs, tmp_path: Path) -> None:
    import ray

    environment = {"env_vars": {"NCCL_DEBUG": "WARN"}}
    config = runs.config("environment", pools={"train": {"workers": 1, "runtime_env": environment}})
    group = RayGroup(config, f"file://{tmp_path}/runs/environment", "train", threads=1, identity="")
    group.term = 1
    try:
        assert group.call(variable, "NCCL_DEBUG") == "WARN"
    finally:
        group.end()
        ray.shutdown()


def test_a_group_whose_ranks_part_begins_anew(runs: Runs, tmp_path: Path) -> None:
    import ray

    config = runs.config("parts")
    asked = RowsCall(Call(1, "generate", 0, StageConfig()), one_rank_fails, ())
    group = RayGroup(config, f"file://{tmp_path}/runs/parts", "train", threads=1, identity="")
    group.term = 1
    weights = Weights(version=0, digest="first")
    try:
        group.call(Worker.load, "actor", weights, None)
        assert group.call(Worker.has_weights, "actor", weights)
        with pytest.raises(StoreUnavailable, match="rank 1"):
            group.call(Worker.rows, [asked])
        assert not group.call(Worker.has_weights, "actor", weights), "new processes hold nothing"
        group.term = 3
        group.call(Worker.load, "actor", weights, None)
        group.term = 2
        with pytest.raises(Fenced, match="serves term 3"):
            group.call(Worker.has_weights, "actor", weights)
    finally:
        group.end()
        ray.shutdown()


def test_ranks_that_wait_in_vain_are_replaced(runs: Runs, tmp_path: Path) -> None:
    import ray

    config = runs.config("waits", pools={"train": {"workers": 2, "timeout_s": 30}})
    asked = RowsCall(Call(1, "generate", 0, StageConfig()), one_rank_never_answers, ())
    group = RayGroup(config, f"file://{tmp_path}/runs/waits", "train", threads=1, identity="")
    group.term = 1
    weights = Weights(version=0, digest="first")
    try:
        group.call(Worker.load, "actor", weights, None)
        waiting = group.submit(Worker.rows, [asked])
        for replica in group.replicas():
            replica.call(Worker.drop, [asked.key])  # a process drops shards while it waits
        with pytest.raises(GroupLost, match=r"rank 0 failed: .*gloo.*[Tt]imed out"):
            waiting.result()
        assert not group.call(Worker.has_weights, "actor", weights), "new processes hold nothing"
    finally:
        group.end()
        ray.shutdown()


def test_doctor_tries_every_engine(runs: Runs) -> None:
    child = runs.processes.cli("doctor", "--engines")
    assert child.wait() == 0, child.text
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in child.text.splitlines() if "│" in line]
    said = dict(cells)
    engines = ["torch", "fsdp", *(f"deepspeed, zero_stage {stage}" for stage in range(4))]
    assert [said[f"engine {name}"] for name in engines] == ["works (float32, bfloat16)"] * 6
    assert said["engine megatron"].startswith(
        "engine megatron needs a GPU" if EXTRAS["megatron"].is_here() else "megatron is not"
    )
    assert said["rollout.engine hf"] == said["store file://"] == "works"
    assert said["rollout.engine vllm"] == ("works" if EXTRAS["vllm"].is_here() else "vllm is not installed")
    assert said["pools on Ray"] == "works: 2 node(s), 2 CPUs, 0 GPUs"
