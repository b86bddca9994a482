"""The batch script of infra/recipes/slurm, in a Slurm of two nodes on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.rlhf.config import RunConfig
from ratchet.tasks.prefect_defaults import TEMPORARY_SERVER
from tests import slurm, tiny
from tests.extras import needs
from tests.history import History
from tests.slurm import Slurm

pytestmark = needs("ray", "slurm")

SCRIPT = Path(__file__).parents[2] / "infra" / "recipes" / "slurm" / "train.sbatch"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes. Their jobs have the environment of a shell in which nothing is configured."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        for name in ("PREFECT_API_URL", "RAY_ADDRESS", *TEMPORARY_SERVER):
            patched.delenv(name, raising=False)
        patched.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        patched.setenv("RAY_worker_niceness", "0")  # as in test_ray.py
        patched.setenv("RAY_memory_monitor_refresh_ms", "0")
        with slurm.slurm(tmp_path_factory.mktemp("slurm"), nodes=2) as started:
            yield started


class Job:
    """A job that trains a run by the recipe."""

    def __init__(self, cluster: Slurm, config: RunConfig, nodes: int) -> None:
        self.cluster, self.config = cluster, config
        path = cluster.folder / f"{config.run.name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        # the iterations are an override, as a user gives it
        arguments = (str(SCRIPT), str(path), f"train.iterations={config.train.iterations}")
        self.number = cluster.run("sbatch", "--parsable", f"--nodes={nodes}", *arguments)

    @property
    def log(self) -> str:
        path = self.cluster.folder / f"ratchet-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def history(self) -> History:
        return History.of(self.config)

    def known(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    def until(self, true: Callable[[], bool], seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"{self.known()}\n{self.log}\n{self.cluster.logs}"
            time.sleep(0.1)

    def until_it_generates(self, iteration: int) -> None:
        self.until(lambda: ("generate", iteration) in self.history.stages or self.has_ended())
        assert self.known()["JobState"] == "RUNNING", self.log

    def has_ended(self) -> bool:
        return self.known()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

    def end(self) -> dict[str, str]:
        """Waits for its end, and that of its processes; returns what Slurm knows about it."""
        self.until(self.has_ended)
        self.until(lambda: not any(word in line for line in self.cluster.processes() for word in ("ray", "ratchet")))
        return self.known()

    def finish(self) -> History:
        known = self.end()
        assert (known["JobState"], known["ExitCode"]) == ("COMPLETED", "0:0"), self.log
        history = self.history
        history.check_sound()
        assert history.state.iteration == self.config.train.iterations
        return history


def config(workspace: Path, cluster: Slurm, name: str, **changes: Any) -> RunConfig:
    """A run with a worker on each of two nodes."""
    pools = {"train": {"workers": 2, "cpus_per_worker": os.cpu_count()}}
    defaults: dict[str, Any] = {
        "run__name": name,
        "run__store": f"file://{cluster.folder}/runs",
        "reward__function": "tests.rewards:slow_letters",
        "algorithm__advantage": "grpo",
        "algorithm__kl__in_reward": None,
        "actor__engine": "fsdp",
        "pools": pools,
    }
    return tiny.config(workspace, **defaults | changes)


def test_a_job_on_two_nodes_that_is_requeued_ends_like_one_that_is_not(cluster: Slurm, workspace: Path) -> None:
    job = Job(cluster, config(workspace, cluster, "quiet"), nodes=2)
    expected = job.finish()
    assert "starting pool train" in job.log
    wrote = expected.results["checkpoints"]["actor"]
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} <= wrote.keys(), "two ranks"

    # preempted: Slurm ends everything and queues the job again
    job = Job(cluster, config(workspace, cluster, "preempted"), nodes=2)
    job.until_it_generates(0)
    cluster.run("scontrol", "requeue", job.number)
    history = job.finish()
    assert job.known()["Restarts"] == "1"
    assert history.results == expected.results

    # near its time limit, of which Slurm tells the script by this signal: it stops and queues itself again
    job = Job(cluster, config(workspace, cluster, "limited"), nodes=2)
    job.until_it_generates(0)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    history = job.finish()
    assert job.known()["Restarts"] == "1"
    assert "continues from the last commit" in job.log
    assert history.results == expected.results


def test_a_job_on_one_node_needs_no_ray(cluster: Slurm, workspace: Path) -> None:
    alone: dict[str, Any] = {"pools": {}, "actor__engine": "torch"}
    job = Job(cluster, config(workspace, cluster, "alone", **alone), nodes=1)
    job.until_it_generates(0)
    cluster.run("scancel", job.number)
    assert job.end()["JobState"] == "CANCELLED", "it is not requeued"
    job = Job(cluster, config(workspace, cluster, "alone", **alone), nodes=1)
    assert job.finish().state.term == 2
    assert "ray" not in job.log.lower()


def test_a_job_ends_with_the_exit_code_of_the_command(cluster: Slurm, workspace: Path) -> None:
    job = Job(cluster, config(workspace, cluster, "wrong", pools={}, model__path="nowhere"), nodes=1)
    known = job.end()
    assert (known["JobState"], known["ExitCode"]) == ("FAILED", "2:0"), job.log
