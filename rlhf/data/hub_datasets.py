"""Finds the files of a dataset on the Hugging Face hub, by the rules of the package `datasets`."""

from __future__ import annotations

import glob
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ratchet.rlhf.config.sections import ENDINGS
from ratchet.rlhf.errors import RatchetError, UserError, in_one_line

IN_PLACE = "hf://datasets/"
"""Prefix of a dataset whose files are not downloaded, but read where they are."""
_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?(?::([\w./-]+))?", re.ASCII)


class HubDataset(NamedTuple):
    """A dataset on the hub, as a config names it."""

    repo: str
    """owner/name."""
    revision: str | None
    """A branch, tag or commit; None: `main`."""
    wanted: str
    """``split``, ``config``, ``config/split`` or nothing."""
    in_place: bool
    """True if its files are read where they are."""


def hub_dataset(path: str) -> HubDataset | None:
    """Parses ``owner/name@revision:config/split``, perhaps after ``hf://datasets/``; None if a path is none.

    Only `owner/name` is needed. A path that ends as a data file does, or that exists on this machine, is none.
    """
    match = _NAME.fullmatch(path.removeprefix(IN_PLACE))
    if match is None or path.endswith(ENDINGS) or Path(path).exists() or Path(path.partition(":")[0]).exists():
        return None
    return HubDataset(match[1], match[2], match[3] or "", path.startswith(IN_PLACE))


def is_cached(dataset: HubDataset) -> bool:
    """True if files of a dataset were downloaded to the hub's cache."""
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE) / f"datasets--{dataset.repo.replace('/', '--')}").is_dir()


@lru_cache(maxsize=256)  # one process sees one commit, though it asks several times
def hub_files(dataset: HubDataset) -> tuple[str, ...]:
    """Finds the files of a dataset, in order: their paths in the hub's cache, or, read in place, their URLs.

    With HF_HUB_OFFLINE, the whole dataset must be in the cache, because a part of it does not tell what is missing.

    Raises:
        UserError: there is no such dataset, config or split, or it is not in the cache.
        RatchetError: the hub cannot be reached.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    repo, revision, wanted, in_place = dataset
    if constants.HF_HUB_OFFLINE:
        return _cached(dataset)
    try:
        urls = _urls(repo, revision, wanted)
        if in_place:
            return tuple(urls)
        names = [url.partition("@")[2].partition("/")[2] for url in urls]
        patterns = list(map(glob.escape, names))
        folder = snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns)
        return tuple(str(Path(folder) / name) for name in names)
    except RatchetError:
        raise
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403, 404):
            raise RatchetError(f"the hub refused {repo}: {in_one_line(error)}") from None
        at = "" if revision is None else f" at {revision}"
        raise UserError(
            f"{repo}: there is no such file or folder here, and no such dataset{at} on the hub that this token may "
            f"read ({error.server_message or error.response.status_code}): check the name, or log in with "
            "`hf auth login`"
        ) from None
    except (FileNotFoundError, ValueError, RuntimeError) as error:  # datasets refuses the repository
        raise UserError(f"cannot read {repo} from the hub: {in_one_line(error)}") from None
    except (HTTPError, OSError) as error:
        raise RatchetError(f"cannot reach {constants.ENDPOINT} for {repo}: {in_one_line(error)}") from None


def _urls(repo: str, revision: str | None, wanted: str) -> list[str]:
    """Returns the URLs of a split's files, at a commit."""
    from datasets import get_dataset_config_names, load_dataset_builder
    from huggingface_hub import HfApi

    from ratchet.rlhf.data.folders import chosen

    commit = HfApi().dataset_info(repo, revision=revision).sha
    config, _, split = wanted.rpartition("/")
    configs = get_dataset_config_names(repo, revision=commit)
    if not config and split in configs:
        config, split = split, ""
    if not config and "default" in configs:
        config = "default"
    config = chosen(repo, "config", configs, config, "")
    files = load_dataset_builder(repo, config, revision=commit).config.data_files or {}
    splits = {str(name): list(urls) for name, urls in files.items()}
    return splits[chosen(repo, "split", splits, split, f"{config}/" if len(configs) > 1 else "")]


def _cached(dataset: HubDataset) -> tuple[str, ...]:
    """Returns the files of a dataset in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from ratchet.rlhf.data.folders import data_files

    repo, revision, wanted, _ = dataset
    try:
        folder = snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        raise UserError(
            f"{repo}: there is no such file or folder here, the hub may not be used (HF_HUB_OFFLINE), and its cache "
            f"does not have the whole dataset: `hf download --repo-type dataset {repo}` puts it there"
        ) from None
    return tuple(data_files(f"{folder}:{wanted}" if wanted else folder))
