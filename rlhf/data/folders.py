"""Finds the files of a dataset in a local folder: a copy of a hub repository, or of `datasets.save_to_disk`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ratchet.rlhf.config.sections import ENDINGS
from ratchet.rlhf.data.harbor import task_folders
from ratchet.rlhf.data.hub_datasets import hub_dataset, hub_files
from ratchet.rlhf.errors import UserError, in_one_line

FORMATS = "Parquet (.parquet), Arrow (.arrow), JSON (.jsonl, .json) and CSV (.csv, .tsv), the last two perhaps with .gz"
"""The formats of `ENDINGS`, for errors."""
NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in a file's path that name its split, as on the hub."""


def data_files(path: str) -> list[str]:
    """Finds the files that a path of a dataset names, in order.

    Args:
        path: a file or its URL, which is returned; a local folder, ``folder:split``, ``folder:config`` or
            ``folder:config/split``; a folder of Harbor's tasks, each of which is one of the files; or a dataset on the
            hub (`hub_dataset`).

    Raises:
        UserError: the folder has no data files, or there are several configs or splits, and the path does not choose.
    """
    folder, wanted = Path(path), ""
    if (on_hub := hub_dataset(path)) is not None:
        return _readable(hub_files(on_hub))
    if not folder.is_dir():
        name, _, wanted = path.rpartition(":")
        folder = Path(name)
        if not name or not folder.is_dir():
            return [path]
    if not wanted and (tasks := task_folders(folder)):
        return list(map(str, tasks))
    config, _, split = wanted.rpartition("/")
    try:
        configs = _configs(folder)
        if not config and split in configs:
            config, split = split, ""
        splits = _saved(folder) or _splits(folder, configs, config)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the dataset in {folder}: {in_one_line(error)}") from None
    files = splits[chosen(folder, "split", splits, split, f"{config}/" if config else "")]
    if not files:
        raise UserError(f"cannot read the dataset in {folder}: its README names files that are not there")
    return _readable(map(str, files))


def _readable(files: Iterable[str]) -> list[str]:
    """Returns the files. Raises UserError if one has another format than `FORMATS`."""
    found = list(files)
    for file in found:
        if not file.endswith(ENDINGS):
            raise unread(file)
    return found


def unread(path: str | Path) -> UserError:
    """Returns the error for a file of an unknown format."""
    return UserError(f"cannot read {path}: the formats are {FORMATS}")


def name_of(path: str) -> str:
    """Returns the name of a dataset: owner/name on the hub, a folder's name, or a file's without its ending and shard
    number.

    `path` is as for `data_files`.
    """
    name, colon, _ = path.rpartition(":")
    if colon and Path(name).is_dir():
        path = name
    elif (on_hub := hub_dataset(path)) is not None:
        return on_hub.repo
    if Path(path).is_dir():
        return Path(path).resolve().name
    stem = Path(Path(path).name.removesuffix(".gz")).stem
    return re.sub(r"-\d{5}-of-\d{5}$", "", stem)


def _saved(folder: Path) -> dict[str, list[Path]]:
    """Returns the splits that `save_to_disk` wrote; none if it did not write the folder."""
    if (folder / "dataset_dict.json").is_file():
        names = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return {name: _saved_files(folder / name) for name in names}
    return {"train": _saved_files(folder)} if (folder / "state.json").is_file() else {}


def _saved_files(folder: Path) -> list[Path]:
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files"):
        raise ValueError(f"{folder} selects rows by an index: call flatten_indices() before save_to_disk()")
    return [folder / file["filename"] for file in state["_data_files"]]


def _splits(folder: Path, configs: Mapping[str, Mapping[str, Any]], wanted: str) -> dict[str, list[Path]]:
    """Returns the splits of a copy of a hub repository: those listed in its README, or by the names of its files."""
    if not configs:
        if wanted:
            raise ValueError(f"its README lists no configs, so there is no {wanted}")
        return _by_name(file for file in folder.rglob("*") if file.name.endswith(ENDINGS))
    default = next((name for name, config in configs.items() if config.get("default") or name == "default"), "")
    config = configs[chosen(folder, "config", configs, wanted or default, "")]
    root = folder / _inside(str(config.get("data_dir", ".")))
    patterns = config.get("data_files")
    if patterns is None:
        return _by_name(file for file in root.rglob("*") if file.name.endswith(ENDINGS))
    splits: dict[str, list[Path]] = {}
    for entry in patterns if isinstance(patterns, list) else [patterns]:
        paths, split = (entry["path"], entry.get("split", "train")) if isinstance(entry, Mapping) else (entry, "train")
        for pattern in [paths] if isinstance(paths, str) else paths:
            splits.setdefault(str(split), []).extend(sorted(root.glob(_inside(pattern))))
    return splits


def _inside(pattern: str) -> str:
    """Checks a pattern of a README: others wrote it, so it may only name files of its own folder."""
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise ValueError(f"its README names {pattern}, which is outside the folder")
    return pattern


def _configs(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Returns the configs in a README, by name."""
    from huggingface_hub.repocard import metadata_load

    readme = folder / "README.md"
    metadata = metadata_load(readme) if readme.is_file() else None
    return {str(config.get("config_name", "default")): config for config in (metadata or {}).get("configs", [])}


def _by_name(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Groups files by the split in their names. Files without one are the split `train`, unless others name theirs."""
    splits: dict[str, list[Path]] = {}
    others: list[Path] = []
    for file in sorted(files):
        if file.name in ("dataset_infos.json", "dataset_info.json"):
            continue
        split = _split_in(file.stem) or _split_in(file.parent.name)
        (splits.setdefault(split, []) if split else others).append(file)
    return splits or ({"train": others} if others else {})


def _split_in(name: str) -> str | None:
    words = re.split(r"[^a-zA-Z]+", name.lower())
    return next((split for split, names in NAMES.items() if any(word in names for word in words)), None)


def chosen(dataset: str | Path, kind: str, names: Iterable[str], wanted: str, before: str) -> str:
    """Returns the wanted name of a split or config, or the only one.

    Args:
        before: what is written between the colon and the name.
    """
    known = list(names)
    if not known:
        raise UserError(f"{dataset} has no data files: the formats are {FORMATS}")
    if wanted in known:
        return wanted
    if not wanted and len(known) == 1:
        return known[0]
    problem = f"no {kind} {wanted}" if wanted else f"several {kind}s"
    raise UserError(f"{dataset} has {problem}: name one of {', '.join(known)}, such as {dataset}:{before}{known[0]}")
