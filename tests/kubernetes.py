"""Prefect's worker for Kubernetes, as its users install it, beside a small API of a cluster on loopback.

The worker is today's release, in an environment of its own (`make kubernetes`): it cannot be installed beside the
Prefect that vLLM allows. The cluster is `tests/kubernetes_api.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.ports import free_port

ENVIRONMENT = Path(__file__).parents[1] / "build" / "kubernetes"
START_S = 600.0


def is_here() -> bool:
    return (ENVIRONMENT / "installed").exists()


@dataclass(frozen=True)
class Kubernetes:
    """A cluster, whose pods are processes."""

    folder: Path
    kubeconfig: Path

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The Jobs that were created, in order."""
        path = self.folder / "jobs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def output(self) -> str:
        """What all pods have printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    @property
    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return environment | {"KUBECONFIG": str(self.kubeconfig), "PREFECT_HOME": str(self.folder / "worker")}

    def prefect(self, *arguments: str) -> None:
        """Runs a command of today's Prefect."""
        subprocess.run([str(ENVIRONMENT / "bin" / "prefect"), *arguments], env=self._environment, check=True)

    @contextmanager
    def worker(self, pool: str, log: Path) -> Iterator[None]:
        """Runs Prefect's worker for a pool."""
        command = [str(ENVIRONMENT / "bin" / "prefect"), "worker", "start", "--pool", pool]
        with log.open("w") as file:
            process = psutil.Popen(command, env=self._environment, stdout=file, stderr=file, cwd=self.folder)
        try:
            yield
        finally:
            process.kill()
            process.wait()


@contextmanager
def kubernetes(folder: Path, images: Mapping[str, Path]) -> Iterator[Kubernetes]:
    """Yields a cluster with images: environments of Python by name."""
    port = free_port()
    (folder / "pods").mkdir()
    cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "nobody"}}
    user = {"name": "nobody", "user": {}}
    config = {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "here"}
    (folder / "kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config}))
    program = Path(__file__).with_name("kubernetes_api.py")
    command = [str(ENVIRONMENT / "bin" / "python"), str(program), str(folder / "pods"), str(port)]
    command += [f"{name}={environment}" for name, environment in images.items()]
    with (folder / "cluster.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "cluster.log").read_text()
                time.sleep(0.1)
        yield Kubernetes(folder / "pods", folder / "kubeconfig")
    finally:
        process.terminate()  # which ends the pods
        process.wait()
