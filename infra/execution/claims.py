"""Claims a run: checks that no other driver is alive, and records the driver's config, code and packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ratchet.infra.execution import heartbeat
from ratchet.infra.execution.standing import is_fit
from ratchet.infra.progress import note
from ratchet.infra.store.log import Fenced
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import SCHEMA_VERSION, Claim, Fork, RunState, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import RunSection
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.errors import UserError

PACKAGES = (
    "ratchet-rlhf",
    "torch",
    "transformers",
    "deepspeed",
    "megatron-core",
    "peft",
    "ray",
    "prefect",
    "pyarrow",
    "numpy",
    "fsspec",
    "s3fs",
)


class Config(Protocol):
    """The config of any kind of run."""

    @property
    def run(self) -> RunSection: ...

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


def run_url(store: str, name: str) -> str:
    """Returns the URL of a run's folder."""
    return f"{store.rstrip('/')}/{name}"


def begin(store: RunStore, config: Config, take_over: bool) -> RunState:
    """Reads the run's state before a claim. Its slot is -1 if the run does not exist.

    Raises:
        UserError: the run is of another kind, or the store cannot keep two drivers apart.
        Fenced: another driver is alive.
    """
    state = store.log.read()
    if state.slot < 0:
        check_store(store.objects, config)
        return state
    assert state.claim is not None
    if is_fit(state.claim.config) != is_fit(config.model_dump(mode="json")):
        kinds = ("a fit (sft, reward-model)", "a run of iterations")
        stored, new = kinds if is_fit(state.claim.config) else kinds[::-1]
        raise UserError(f"{store.url} is {stored}, and this is {new}: choose another run.name")
    refuse_if_driven(store, take_over)
    return state


def claim(
    store: RunStore,
    config: Config,
    *,
    initial: Mapping[str, Weights],
    frozen: Iterable[str] = (),
    ahead: int = 0,
    outside: Mapping[str, str] | None = None,
    versions: Mapping[str, int] | None = None,
    computes: bool = True,
) -> None:
    """Claims the run, which fences every older driver; writes `run.json` if it is missing. See `Claim` for the
    arguments; `computes` is false if another program computes the run."""
    store.log.claim(
        Claim(
            config=config.model_dump(mode="json"),
            code=code_digest(),
            packages=package_versions(),
            threads=set_threads(store.state.claim) if computes else 0,
            host=socket.gethostname(),
            ahead=ahead,
            outside=dict(outside or {}),
            versions=dict(versions or {}),
            initial=dict(initial),
            frozen=tuple(frozen),
        )
    )
    if not run_json_is_readable(store):
        store.objects.put("run.json", run_json(store))


def refuse_if_driven(store: RunStore, take_over: bool) -> None:
    """Raises `Fenced` if another driver is alive, unless `take_over` is set."""
    if not take_over and (alive := heartbeat.is_alive(store.objects, lambda text: note(text))):
        name = store.url.rpartition("/")[2]
        raise Fenced(
            f"run {name} is being driven (pid {alive.pid} on {alive.host}): stop it with "
            f"`ratchet stop {name}`, or take it over with --take-over"
        )


def check_store(objects: ObjectStore, config: Config) -> None:
    """Raises `UserError` for a store on which two drivers could overwrite each other's commits."""
    if not config.run.single_writer and not objects.honours_create():
        raise UserError(
            f"the store {config.run.store} ignores create-if-absent, so two drivers could overwrite each other's "
            "commits: use a store with conditional writes, or set run.single_writer: true and run one driver only"
        )


def run_json_is_readable(store: RunStore) -> bool:
    """True if `run.json` exists and holds a config."""
    try:
        return isinstance(json.loads(store.objects.get("run.json"))["config"], dict)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def run_json(store: RunStore) -> bytes:
    """Returns the contents of `run.json`: a copy for users of data in the log's first record."""
    [first, *_] = store.log.record(0).commits
    parent, at = (store.objects.of_run(first.parent).url, first.at) if isinstance(first, Fork) else (None, None)
    claim = first.claim if isinstance(first, Fork) else first
    assert isinstance(claim, Claim), "a log begins with a claim or a fork"
    document = {"schema_version": SCHEMA_VERSION, "config": claim.config, "parent": parent} | ({"at": at} if at else {})
    return json.dumps(document, indent=1).encode()


def set_threads(last: Claim | None) -> int:
    """Sets the number of CPU threads to that of the last claim, and returns it."""
    import torch

    # on CPUs, results depend on the number of threads
    if last is not None and last.threads and not accelerator.is_available():
        torch.set_num_threads(last.threads)
    return torch.get_num_threads()


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that can affect results."""
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def code_digest() -> str:
    """Returns the sha256 of the sources of the four packages."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for package in ("flows", "tasks", "rlhf", "infra"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
