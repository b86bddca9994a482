"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

from tests import shapes

# Every call of the algorithms is held to the shapes and types in its hints: before anything else imports them.
with install_import_hook("ratchet.rlhf.algorithms", f"{shapes.__name__}.checked"):
    import ratchet.rlhf.algorithms.objectives  # noqa: F401  (which imports all the others)

from tests import ceph, extras, tiers, tiny
from tests.peak_memory import PeakMemory
from tests.prefect_server import locked, prefect_api, used
from tests.processes import Processes
from tests.s3_server import moto_server, s3_at

ROOT = Path(__file__).parents[1]
paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # processes of the tests import this checkout, too
if "PYTEST_XDIST_WORKER" not in os.environ:  # whose workers share it
    STATE = tempfile.TemporaryDirectory(prefix="ratchet-state-")
    os.environ["XDG_STATE_HOME"] = STATE.name
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "false")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
# a slow machine records its runs, too; the imports above have set Ratchet's defaults
os.environ["PREFECT_API_REQUEST_TIMEOUT"] = "200"
os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "900"


hypothesis.settings.register_profile("tests", deadline=None)  # which a busy machine would miss
hypothesis.settings.load_profile("tests")

LARGE_TESTS = extras.LargeTests()
PEAK_MEMORY = pytest.StashKey[PeakMemory]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, not in each worker of pytest-xdist
        config.stash[PEAK_MEMORY] = PeakMemory()
        tiers.set_day()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(config.stash[PEAK_MEMORY].end())


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Runs large tests first: one worker of pytest-xdist runs them, and the other one the small tests."""
    tiers.choose(config, items)
    yield
    items.sort(key=lambda item: not extras.is_large(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    extras.check(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    LARGE_TESTS.begin(item)
    try:
        return (yield)
    finally:
        LARGE_TESTS.end(nextitem)


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Returns a folder of this session, the same for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "common"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def without_rank() -> Iterator[None]:
    """Forgets the rank that DeepSpeed's engine gave this process: Accelerate in a child would wait for other ranks."""
    yield
    os.environ.pop("LOCAL_RANK", None)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the API's URL of a real Prefect server, which this process and its children use."""

    folder = tmp_path_factory.mktemp("prefect")
    with prefect_api(folder) as url, used(url, folder):
        yield url


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """Yields the URL of a small S3 server, which starts with the first test that asks for it."""
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def ceph_gateway(common: Path) -> Iterator[str]:
    """Yields the URL of Ceph's S3 gateway, one for all workers of pytest-xdist."""
    with ceph.ceph_server(common / "ceph") as endpoint:
        yield endpoint


@pytest.fixture
def s3(moto: str) -> Iterator[str]:
    """Yields the URL of a bucket on moto."""
    with s3_at(moto) as url:
        yield url


@pytest.fixture
def on_ceph(ceph_gateway: str) -> Iterator[str]:
    """Yields the URL of a bucket on Ceph."""
    with s3_at(ceph_gateway) as url:
        yield url


@pytest.fixture(params=["s3", pytest.param("on_ceph", marks=extras.needs("ceph"))], ids=["moto", "ceph"])
def each_s3(request: pytest.FixtureRequest) -> str:
    """Returns the URL of a bucket on each of the S3 servers."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="session")
def workspace(common: Path) -> Path:
    """Returns a folder with a tiny model and its prompts, for `tiny.config`."""
    folder = common / "workspace"
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if not (folder / "done").exists():
            tiny.workspace(folder)
            tiny.prompt_file(folder / "held_out.parquet", prompts=3)
            (folder / "done").touch()
    return folder


@pytest.fixture
def processes(prefect_server: str, tmp_path: Path) -> Iterator[Processes]:
    """Starts drivers in processes of their own, and ends those that are left."""
    started = Processes(tmp_path)
    yield started
    started.close()
