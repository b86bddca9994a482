"""Pushes snapshots and trajectories to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratchet.infra.runs.embedded_images import embedded, with_images
from ratchet.infra.runs.joined_rows import SPLITS, JoinedRows
from ratchet.infra.runs.model_card import trajectories_card
from ratchet.infra.runs.run import CARD, LAYOUTS, Run
from ratchet.infra.store.images import Images
from ratchet.infra.store.records import sha256_of
from ratchet.infra.store.run_store import parquet_bytes
from ratchet.rlhf.errors import RatchetError, UserError, counted, in_one_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoUrl

COMMIT_BYTES = 256 * 2**20
"""Size of the files after which a push commits them: what an interrupted push has committed is not uploaded again."""
COMMIT_FILES = 50
"""Largest number of files in a commit."""


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    url: str
    private: bool


def push(
    run: Run, repo: str, version: int, role: str = "actor", *, adapter: bool = False, public: bool = False
) -> Pushed:
    """Uploads a snapshot to a model repository on the hub, as `Run.export` writes it to be published.

    The repository is created if it does not exist. The token is HF_TOKEN's, or that of a login (`hf auth login`).

    Args:
        repo: the repository, as owner/name; without an owner it is the user's.
        adapter: push only the LoRA adapters; see `Run.export`.
        public: make a new repository public, and allow an existing one that is public.

    Raises:
        UserError: the name is malformed, there is no token, the hub may not be used or refuses access, the repository
            is public and `public` is false, or `Run.export` refuses.
        RatchetError: the hub cannot be reached, or fails.
        Corrupt: the snapshot is missing or damaged.
    """
    _check(repo)
    # everything that can be refused is refused before weights are read
    run.exportable(version, role, adapter=adapter)
    hub, url, private = _repository(repo, "model", public=public)
    with tempfile.TemporaryDirectory() as folder:
        run.export(version, folder, role, adapter=adapter, is_published=True)
        name = run.store.url.rpartition("/")[2]
        with _one_line(repo):
            hub.upload_folder(
                repo_id=url.repo_id,
                folder_path=folder,
                commit_message=f"{role} after {counted(version, 'iteration')} of {name}",
                delete_patterns=list(LAYOUTS),  # files of earlier pushes
            )
    return Pushed(str(url), private)


def push_trajectories(run: Run, repo: str, *, without: Collection[str] = (), public: bool = False) -> Pushed:
    """Uploads the trajectories of closed iterations to a dataset repository on the hub, joined over the stages. The
    column `images` has the images themselves.

    Each iteration is a file of the split `train`, and one of `validation` if a validation ran before it. A file that
    the repository has is not uploaded again, so a push that was interrupted continues, and a later one adds iterations.

    Args:
        without: columns to leave out.

    Raises:
        UserError: as `push`, or as `JoinedRows`; or an image is missing or damaged.
        RatchetError: as `push`.
        Corrupt: an object of the run is missing or damaged.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.hf_api import RepoFile

    _check(repo)
    if run.is_fit:
        raise UserError(f"{run.store.url} is a fit, which has no trajectories: name a run of iterations")
    rows, images = JoinedRows(run, without), Images(run.store.objects)
    hub, url, private = _repository(repo, "dataset", public=public)
    place = {"repo_id": url.repo_id, "repo_type": "dataset"}
    name = run.store.url.rpartition("/")[2]
    with _one_line(repo):
        entries = hub.list_repo_tree(**place, recursive=True)
        there = {file.path: file.lfs.sha256 for file in entries if isinstance(file, RepoFile) and file.lfs}
    waiting: list[CommitOperationAdd] = []

    def commit() -> None:
        with _one_line(repo):
            hub.create_commit(**place, operations=waiting, commit_message=f"trajectories of {name}")
        waiting.clear()

    counts = dict.fromkeys(SPLITS, 0)
    for iteration in rows.iterations:
        for split in SPLITS:
            if (table := rows.table(iteration, split)) is None:
                continue
            counts[split] += len(table)
            path, data = f"data/{split}-{iteration:06d}.parquet", parquet_bytes(with_images(table, images))
            if there.get(path) != sha256_of(data):
                waiting.append(CommitOperationAdd(path, data))
        if sum(operation.upload_info.size for operation in waiting) > COMMIT_BYTES or len(waiting) >= COMMIT_FILES:
            commit()
    waiting.append(CommitOperationAdd(CARD, trajectories_card(run, embedded(rows.schema), counts, without).encode()))
    commit()
    return Pushed(str(url), private)


def _check(repo: str) -> None:
    """Raises UserError if a repository's name is malformed."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{repo} is not a name of a repository (owner/name): {in_one_line(error)}") from None


def _repository(repo: str, kind: str, *, public: bool) -> tuple[HfApi, RepoUrl, bool]:
    """Opens a repository for writing, and creates it if it does not exist; the last value is True if it is private."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing can be pushed: unset it")
    with _one_line(repo):
        token = get_token()
        if token is None:
            raise UserError("there is no token for the hub: log in with `hf auth login`, or set HF_TOKEN")
        hub = HfApi(token=token)
        url = hub.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
        private = bool(hub.repo_info(url.repo_id, repo_type=kind).private)
    if not private and not public:
        raise UserError(f"{url} is public: add --public to push to it, or name another repository")
    return hub, url, private


@contextmanager
def _one_line(repo: str) -> Iterator[None]:
    """Raises the hub's errors as one line for the user."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        reason = error.server_message or in_one_line(error)
        if error.response.status_code not in (401, 403):
            raise RatchetError(f"the hub refused {repo}: {reason}") from None
        raise UserError(
            f"the hub does not let this token write to {repo} ({reason}): check the name, and that the token may write "
            "there (`hf auth whoami` tells whose it is; HF_TOKEN comes before a login)"
        ) from None
    except HTTPError as error:
        raise RatchetError(
            f"cannot reach {constants.ENDPOINT}: {in_one_line(error)}; repeat the command later"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:  # a failed upload, unreadable files, invalid metadata
        cause = f" ({in_one_line(error.__cause__)})" if error.__cause__ is not None else ""
        raise RatchetError(f"{repo} was not pushed: {in_one_line(error)}{cause}") from error
