"""Runs a second S3 server: Ceph's gateway over one storage daemon on loopback, from Debian's packages.

`python -m tests.ceph fetch` (`make ceph`) unpacks them into `build/ceph`; nothing is installed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.ports import free_port
from tests.prefect_server import locked
from tests.s3_server import CREDENTIALS, make_bucket

UNPACKED = Path(__file__).parents[1] / "build" / "ceph"
PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-base", "ceph-common", "librados2")
START_S = 600.0

CONFIG = """\
[global]
fsid = {fsid}
mon_host = [v1:127.0.0.1:{monitor}]
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
public_network = 127.0.0.0/8
cluster_network = 127.0.0.0/8
ms_bind_ipv6 = false
run_dir = {data}
crash_dir = {data}
admin_socket = {data}/$name.asok
pid_file = {data}/$name.pid
log_file = {data}/$name.log
plugin_dir = {libraries}/ceph
osd_class_dir = {libraries}/rados-classes
erasure_code_dir = {libraries}/ceph/erasure-code
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
paxos_propose_interval = 0.05
[mon]
mon_data = {data}/mon
# with its default of 5 % free, it ends on a disk of 250 GB that has 12 GB left
mon_data_avail_crit = 1
[osd]
osd_data = {data}/osd
# a sparse file: it takes the room of what is stored
bluestore_block_size = 8589934592
bluestore_block_db_create = false
bluestore_block_wal_create = false
osd_memory_target = 939524096
osd_op_num_shards = 1
osd_op_num_threads_per_shard = 2
[client.rgw.a]
rgw_data = {data}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{gateway}
rgw_thread_pool_size = 32
rgw_zone = default
"""


def missing() -> str | None:
    """Returns the reason why there is no Ceph here; None if there is one."""
    return None if UNPACKED.exists() else "Ceph is not here: `make ceph`"


@contextmanager
def ceph_server(folder: Path) -> Iterator[str]:
    """Yields the gateway's URL, with a bucket.

    All processes that name the same folder share one gateway, which ends when the last of them has left the block or
    has died: each holds a lock while it uses the gateway.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "users").open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with locked(folder):
            if not (folder / "endpoint").exists():
                _start(folder)
        yield (folder / "endpoint").read_text()


def _start(folder: Path) -> None:
    log = folder / "ceph.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ceph", "serve", str(folder)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # it outlives this process if another uses it
        )
    while not (folder / "endpoint").exists():
        assert process.poll() is None, f"Ceph did not start: {log.read_text()[-3000:]}"
        time.sleep(0.1)


def serve(folder: Path) -> None:
    """Runs the daemons until no process uses them."""
    with (
        (folder / "users").open("a") as users,
        tempfile.TemporaryDirectory(prefix="ceph-") as data,
        closing(_Cluster(Path(data))) as cluster,
    ):
        endpoint = cluster.start()
        make_bucket(endpoint)
        (folder / "endpoint.new").write_text(endpoint)
        (folder / "endpoint.new").replace(folder / "endpoint")
        fcntl.flock(users, fcntl.LOCK_EX)  # waits for them
        (folder / "endpoint").unlink()


class _Cluster:
    """A monitor, a storage daemon and a gateway."""

    def __init__(self, data: Path) -> None:
        self.data, self.config = data, data / "ceph.conf"
        [libraries] = (UNPACKED / "usr" / "lib").glob("*-linux-gnu")
        path = [libraries, libraries / "ceph", UNPACKED / "lib" / libraries.name]
        self.environment = os.environ | {
            "CEPH_CONF": str(self.config),
            "LD_LIBRARY_PATH": ":".join(map(str, path)),
        }
        self.fsid, self.monitor, self.gateway = str(uuid.uuid4()), free_port(), free_port()
        self.config.write_text(
            CONFIG.format(fsid=self.fsid, monitor=self.monitor, gateway=self.gateway, data=data, libraries=libraries)
        )
        self.deadline = time.monotonic() + START_S
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> str:
        """Returns the gateway's URL, as soon as it answers and knows our credentials."""
        for name in ("mon", "osd", "rgw"):
            (self.data / name).mkdir()
        address, storage = f"127.0.0.1:{self.monitor}", str(uuid.uuid4())
        monitors = str(self.data / "monitors")
        self._run("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", f"[v1:{address}]", monitors)
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monitors)
        self._daemon("ceph-mon", "-i", "a", "--public-addr", f"v1:{address}")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", storage)
        self._daemon("ceph-osd", "-i", "0")
        self._daemon("radosgw", "-n", "client.rgw.a")
        self._run(
            "radosgw-admin",
            "user",
            "create",
            "--uid=tests",
            "--display-name=tests",
            f"--access-key={CREDENTIALS['AWS_ACCESS_KEY_ID']}",
            f"--secret={CREDENTIALS['AWS_SECRET_ACCESS_KEY']}",
        )
        url = f"http://127.0.0.1:{self.gateway}"
        while not _answers(url):
            self._wait()
        return url

    def close(self) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.kill()
            daemon.wait()

    def _run(self, program: str, *arguments: str) -> None:
        """Waits for a program, which itself would wait for minutes for a daemon that has ended."""
        with subprocess.Popen(
            _command(program, *arguments), env=self.environment, stdout=subprocess.DEVNULL
        ) as process:
            try:
                while process.poll() is None:
                    self._wait()
            finally:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"{program} failed with {process.returncode}")

    def _wait(self) -> None:
        ended = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
        if ended or time.monotonic() > self.deadline:
            raise RuntimeError(f"{ended[0]} has ended" if ended else f"no answer in {START_S:.0f} s")
        time.sleep(0.05)

    def _daemon(self, program: str, *arguments: str) -> None:
        self.daemons[program] = subprocess.Popen(_command(program, "-f", *arguments), env=self.environment)


def _command(program: str, *arguments: str) -> list[str]:
    """Returns the command of a process that the kernel ends if this one is killed.

    Without `--no-mon-config` a daemon forgets the cluster's id when it has asked the monitor for its config, and its
    next question may come before it has learned it again: then it ends with "wrong fsid".
    """
    path = UNPACKED / "usr" / "bin" / program
    return ["setpriv", "--pdeathsig", "KILL", str(path), "--no-mon-config", *arguments]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def fetch() -> None:
    """Unpacks the packages, and those of their dependencies that this machine lacks.

    apt checks their signatures; its lists and archives are in a folder of their own, so that it needs neither root nor
    an earlier `apt-get update`.
    """
    if UNPACKED.exists():
        return
    for program in ("apt-get", "dpkg-deb", "setpriv"):
        if shutil.which(program) is None:
            raise SystemExit(f"Ceph cannot be had here: it comes from Debian's packages, and there is no {program}")
    UNPACKED.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=UNPACKED.parent) as name:
        folder, root = Path(name), Path(name) / "root"
        for needed in ("state/lists/partial", "cache/archives/partial", "root"):
            (folder / needed).mkdir(parents=True)
        options = {
            "Dir::State": folder / "state",
            "Dir::State::status": "/var/lib/dpkg/status",
            "Dir::Cache": folder / "cache",
            "APT::Sandbox::User": "",
            "APT::Update::Error-Mode": "any",
            "Debug::NoLocking": 1,
        }
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
        _quiet(*apt, "update")
        _quiet(*apt, "-y", "--no-install-recommends", "--download-only", "--reinstall", "install", *PACKAGES)
        for archive in (folder / "cache" / "archives").glob("*.deb"):
            _quiet("dpkg-deb", "-x", str(archive), str(root))
        root.rename(UNPACKED)


def _quiet(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reasons = [line.removeprefix("E: ") for line in done.stderr.splitlines() if not line.startswith("W: ")]
        raise SystemExit(f"Ceph cannot be had here: {command[0]} failed: {next(iter(reasons), 'it did not say why')}")


if __name__ == "__main__":
    if sys.argv[1] == "fetch":
        fetch()
    else:
        serve(Path(sys.argv[2]))
