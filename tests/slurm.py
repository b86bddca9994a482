"""A Slurm of several machines on this one, as root, from Debian's packages (`make slurm`).

Each node has a network, a host name, shared memory and a folder for Ray of its own: namespaces of Linux, which end with
the block, and everything in them. The file system is shared, as on a cluster. Nothing outside of a folder changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

START_S = 120.0
SPACES = ("--mount", "--uts", "--net", "--pid", "--mount-proc", "--fork", "--kill-child")
"""The namespaces of the controller, in which those of the nodes are made."""

CONFIG = """\
ClusterName=tests
SlurmctldHost=controller
SlurmUser=root
MailProg=/bin/true
# a job that is requeued waits until the credential of its start has expired, and then for a scheduler
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SchedulerParameters=sched_interval=1,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
NodeName={nodes} CPUs={cpus}
PartitionName=tests Nodes=ALL Default=YES OverTimeLimit=0
"""

START = """\
set -euo pipefail
cd "$1"
hostname controller
mount --bind hosts /etc/hosts
mount -t tmpfs run /run
ip link set lo up
ip link add slurm type bridge
ip address add 10.0.0.254/24 dev slurm
ip link set slurm up
munged --foreground --force --key-file=munge.key --socket="$1/munge.socket" --pid-file="$1/munge.pid" \
    --log-file="$1/munge.log" --seed-file="$1/munge.seed" &
slurmctld -D >slurmctld.log 2>&1 &
mkdir -p /tmp/ray
number=0
for node in ${@:2}; do
    number=$((number + 1))
    ip netns add "$node"
    ip link add "$node" type veth peer name eth0 netns "$node"
    ip link set "$node" up master slurm
    ip -n "$node" link set lo up
    ip -n "$node" address add "10.0.0.$number/24" dev eth0
    ip -n "$node" link set eth0 up
    ip -n "$node" route add default via 10.0.0.254
    nsenter --net="/run/netns/$node" unshare --uts --mount bash -c '
        hostname "$0"
        mount -t tmpfs shared /dev/shm
        mount -t tmpfs ray /tmp/ray
        exec slurmd -D' "$node" >"$node.log" 2>&1 &
done
wait
"""


def is_here() -> bool:
    """True if its programs are installed, and this user may make namespaces, which root may not in some containers."""
    if os.getuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "ip"))):
        return False
    return not subprocess.run(["unshare", *SPACES, "true"], capture_output=True).returncode


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    folder: Path
    init: int
    """The first process in its namespaces."""

    def run(self, *command: str) -> str:
        """Runs a command on the machine of the controller; returns what it prints."""
        inside = ["nsenter", f"--target={self.init}", f"--wd={self.folder}", "--mount", "--uts", "--net", "--pid"]
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run([*inside, *command], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}\n{self.logs}"
        return done.stdout.strip()

    @property
    def logs(self) -> str:
        """The end of what its daemons have printed."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def job(self, number: str) -> dict[str, str]:
        """Returns what Slurm knows about a job, by name."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def processes(self) -> list[str]:
        """Returns the command lines of all processes in the cluster."""
        return [" ".join(process.cmdline()) for process in psutil.Process(self.init).children(recursive=True)]


@contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[Slurm]:
    """Yields a cluster of nodes, each with all CPUs of this machine; its files are in `folder`."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    for name in ("state", *names):
        (folder / name).mkdir()
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, nodes=",".join(names), cpus=os.cpu_count()))
    addresses = {"localhost": "127.0.0.1", "controller": "10.0.0.254"}
    addresses |= {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)}
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "start.sh").write_text(START)
    command = ["unshare", *SPACES, "bash", str(folder / "start.sh"), str(folder), *names]
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    with (folder / "start.log").open("w") as log:
        outside = psutil.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not (inside := outside.children()):
            assert outside.poll() is None and time.monotonic() < deadline, (folder / "start.log").read_text()
            time.sleep(0.05)
        cluster = Slurm(folder, inside[0].pid)
        while not _answers(cluster, nodes):
            assert outside.poll() is None and time.monotonic() < deadline, cluster.logs
            time.sleep(0.1)
        yield cluster
    finally:
        outside.kill()
        outside.wait()


def _answers(cluster: Slurm, nodes: int) -> bool:
    try:
        return cluster.run("sinfo", "--noheader", "--format=%D %t") == f"{nodes} idle"
    except AssertionError:
        return False
