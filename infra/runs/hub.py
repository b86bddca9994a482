"""Pushes a snapshot to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ratchet.infra.runs.run import LAYOUTS, Run
from ratchet.rlhf.errors import RatchetError, UserError, counted, in_one_line


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
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{repo} is not a name of a repository (owner/name): {in_one_line(error)}") from None
    # everything that can be refused is refused before weights are read
    run.exportable(version, role, adapter=adapter)
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing can be pushed: unset it")
    with _one_line(repo):
        token = get_token()
        if token is None:
            raise UserError("there is no token for the hub: log in with `hf auth login`, or set HF_TOKEN")
        hub = HfApi(token=token)
        url = hub.create_repo(repo, private=not public, exist_ok=True)
        private = bool(hub.model_info(url.repo_id).private)
    if not private and not public:
        raise UserError(f"{url} is public: add --public to push to it, or name another repository")
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
