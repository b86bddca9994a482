"""Reads a run as pandas frames: only committed data, and without claiming the run."""

from __future__ import annotations

import json
import shutil
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow as pa

from ratchet.infra.execution.claims import run_url
from ratchet.infra.execution.standing import is_fit
from ratchet.infra.progress import note
from ratchet.infra.store.images import Images
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.manifest import Checkpoint
from ratchet.infra.store.object_store import LocalBackend, ObjectStore
from ratchet.infra.store.records import ObjectRef, RunState, StageCommit
from ratchet.infra.store.run_store import UPDATE_ACTOR, VALIDATE, RunStore
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig, RunSection, stored_config
from ratchet.rlhf.config.published import published_text
from ratchet.rlhf.config.roles import is_critic
from ratchet.rlhf.errors import RatchetError, UserError, counted, reached
from ratchet.rlhf.schema import TRAJECTORY, frame_of, trajectory_of

if TYPE_CHECKING:
    import pandas as pd

OnDamage = Callable[[Corrupt], None]

ADAPTER_CONFIG = "adapter_config.json"
LAYOUTS = (
    *("config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(ADAPTER_CONFIG, "adapter_model*.safetensors"),
)
"""Files of models and of adapters, whole or in shards. Old ones would be loaded together with new ones."""
CARD = "README.md"
"""The model card of a model folder."""


def open_run(url: str) -> Run:
    """Opens a run for reading, as it is now.

    Args:
        url: the run's folder, such as ``s3://bucket/runs/countdown`` or ``./runs/countdown``.

    Raises:
        UserError: there is no run.
        Corrupt: the log is damaged.
    """
    store = RunStore(ObjectStore(url))
    if store.log.read().slot < 0:
        raise no_run(url)
    return Run(store)


def no_run(url: str) -> UserError:
    """Makes the error for a URL at which there is no run; it names the runs with the most similar names."""
    parent, _, name = url.rstrip("/").rpartition("/")
    store = parent or str(RunSection.model_fields["store"].default)
    try:
        near = get_close_matches(name, run_names(store), n=3)
    except RatchetError:  # the store cannot be listed: no suggestions then
        near = []
    if parent and near:
        remedy = f"is it {' or '.join(near)}?"
    elif parent:
        remedy = f"check the name, and the store {parent} (--store or RATCHET_STORE), whose runs `ratchet ls` lists"
    else:
        remedy = f"give its folder, such as {' or '.join(run_url(store, candidate) for candidate in near or [name])}"
    return UserError(f"there is no run at {url}: {remedy}")


def run_names(store_url: str) -> list[str]:
    """Lists the folders of a store, sorted: its runs, and perhaps others. Empty if the store does not exist."""
    try:
        entries = _entries(store_url)
    except FileNotFoundError:
        return []
    folders = (entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")
    return sorted(name for name in folders if not name.startswith("."))


def check_store(store_url: str) -> None:
    """Raises `UserError` if the folder or the bucket of a store does not exist."""
    try:
        _entries(store_url)
    except FileNotFoundError as error:
        is_local = isinstance(ObjectStore(store_url).backend, LocalBackend)
        if is_local or error.__cause__ is not None:  # an object store has no empty folders
            kind = "folder" if is_local else "bucket"
            raise UserError(f"--store {store_url}: there is no such {kind}: name the {kind} of your runs") from None


def _entries(store_url: str) -> list[dict[str, Any]]:
    """Lists the folder of runs, as fsspec does. Raises `FileNotFoundError` if there is none."""
    objects = ObjectStore(store_url)
    fs, root = fsspec.core.url_to_fs(store_url, use_listings_cache=False)
    entries: list[dict[str, Any]] = objects.retry("list its runs", lambda: fs.ls(root.rstrip("/"), detail=True))
    return entries


def own_answers(rows: pd.DataFrame) -> pd.DataFrame:
    """Selects a row for each trajectory that the policy of its iteration wrote, without repeated ones (`data.replay`).

    Of an agent's trajectory, only the row of the last branch counts.
    """
    if "replayed_from" in rows:
        rows = rows[rows["replayed_from"].isna()]
    return rows[~rows["trajectory_id"].map(trajectory_of).duplicated(keep="last")]


def row_stages(state: RunState) -> list[str]:
    """Lists the stages that write rows, in order, started or not; updates write none."""
    complete = (
        name for name, commit in state.stages.items() if isinstance(commit, StageCommit) and commit.weights is None
    )
    return list(dict.fromkeys((*TRAJECTORY.stages, *state.shards, *complete)))


def _remove_weights(folder: Path) -> None:
    """Removes the weights of an earlier export."""
    # adapters left behind would be applied to weights that contain them
    for pattern in LAYOUTS:
        for path in folder.glob(pattern):
            path.unlink()


def refuse(damage: Corrupt) -> None:
    """Raises the error: the default `damaged` callback."""
    raise damage


class Run:
    """A run as of the moment it was opened.

    Methods raise `Corrupt` if an object is missing or damaged. Those with a callback `damaged` call it with each such
    error instead, and leave that iteration out; the default raises the first error.
    """

    def __init__(self, store: RunStore) -> None:
        self.store = store

    def __repr__(self) -> str:
        """Returns the run's URL and its progress, such as ``Run('file://./runs/countdown', 20 of 34 iterations)``."""
        closed = self.state.iteration
        if self.is_fit:
            return f"Run({self.store.url!r}, a fit with {counted(closed, 'round')})"
        return f"Run({self.store.url!r}, {reached(closed, self.config.known_iterations)})"

    @property
    def state(self) -> RunState:
        return self.store.state

    @property
    def is_fit(self) -> bool:
        """True for a fine-tuning run (sft, reward-model), which has no trajectories."""
        assert self.state.claim is not None
        return is_fit(self.state.claim.config)

    @property
    def config(self) -> RunConfig:
        """The config of the newest driver. Raises `UserError` if the run is a fine-tuning run."""
        assert self.state.claim is not None
        if self.is_fit:
            raise UserError(f"{self.store.url} is a fit, not a run of iterations: `ratchet status` shows its metrics")
        return stored_config(self.state.claim.config, f"{self.store.url}, newest claim")

    @property
    def trainer(self) -> str | None:
        """The other trainer that made the trajectories: it computes the run, or the run scores its answers again. None:
        Ratchet, or unknown, because the run that is scored again was deleted."""
        config = self.config
        if config.observed is not None:
            return config.observed.trainer
        if config.data.generations is None:
            return None
        try:
            return open_run(config.data.generations).trainer
        except RatchetError:
            return None

    def trajectories(
        self,
        iterations: int | Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        damaged: OnDamage = refuse,
    ) -> pd.DataFrame:
        """Returns committed trajectories, joined over the stages.

        Args:
            iterations: one iteration or several; None for all, including the open iteration.
            columns: None for all.

        Returns:
            One row per trajectory, with the columns `iteration` and `columns`. An open iteration has only the rows that
            all stages of the chosen columns have committed.

        Raises:
            UserError: the run has no such iteration, or a column does not exist.
        """
        import pandas as pd

        if iterations is None:
            iterations = range(self.state.iteration + 1)
        chosen = [iterations] if isinstance(iterations, int) else list(iterations)
        last = max([self.state.iteration, *self.state.ahead])
        if beyond := [iteration for iteration in chosen if not 0 <= iteration <= last]:
            raise UserError(
                f"there is no iteration {beyond[0]}: the run has iterations 0 to {last} "
                f"({self.state.iteration} is open)"
            )
        readable: list[tuple[RunState, dict[str, tuple[str, ...]]]] = []
        known = dict.fromkeys(column.name for column in TRAJECTORY.columns)
        for iteration in chosen:
            try:
                state = self.store.iteration_state(iteration)
                by_stage = self._columns(state)
            except Corrupt as damage:
                damaged(damage)
            else:
                readable.append((state, by_stage))
                known |= dict.fromkeys(name for names in by_stage.values() for name in names)
        asked = [name for name in columns or () if name != "iteration"]  # always present
        if unknown := [name for name in asked if name not in known]:
            raise UserError(f"there is no column {unknown[0]}; columns are iteration, {', '.join(known)}")
        wanted = list(known) if columns is None else asked
        frames = []
        for state, by_stage in readable:
            try:
                frames.append(self._iteration(state, by_stage, wanted, columns is None))
            except Corrupt as damage:
                damaged(damage)
        frames = [frame for frame in frames if len(frame)]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["iteration", *wanted])

    def _columns(self, state: RunState) -> dict[str, tuple[str, ...]]:
        """Returns the columns of training trajectories in an iteration, by stage."""
        return {name: self.store.columns_of(state, name) for name in row_stages(state) if name != VALIDATE}

    def query(self, sql: str) -> pd.DataFrame:
        """Runs one SQL statement over the run's committed data; `ratchet.query` describes the tables, and takes several
        runs.

        Raises `UserError` if DuckDB rejects the query.
        """
        from ratchet.infra.runs.query import query

        return query(self, sql)

    def validation(
        self, iterations: int | Iterable[int] | None = None, columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """Returns committed validations, one row per trajectory; `iteration` is the iteration before which the
        validation ran.

        Args:
            iterations: one iteration or several; None for all.
            columns: None for all.
        """
        import pandas as pd

        if iterations is None:
            iterations = range(self.state.iteration + 1)
        frames = []
        for iteration in [iterations] if isinstance(iterations, int) else iterations:
            frame = self._stage_frame(self.store.iteration_state(iteration), VALIDATE, columns)
            if frame is not None:
                frames.append(frame.assign(iteration=iteration))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def image(self, digest: str) -> bytes:
        """Returns the encoded bytes of an image, such as a PNG, as they were given.

        Args:
            digest: from the column `images` of a trajectory.

        Raises:
            UserError: `digest` is no digest, or the image is missing or damaged.
        """
        return Images(self.store.objects).get(digest)

    def served(self, damaged: OnDamage = refuse) -> pd.DataFrame:
        """Returns the answers of `ratchet serve`, one row each; docs/columns.md describes the columns."""
        from ratchet.infra.runs.served import served

        frame: pd.DataFrame = served(self.store, damaged).to_pandas()
        return frame

    def canary(self, iteration: int) -> pd.DataFrame:
        """Returns the newest check of the rollout's weights in an iteration, a row for each text and engine;
        docs/columns.md describes the columns. Empty if no weights were transferred in it."""
        import pandas as pd

        checked = self.store.iteration_state(iteration).canary
        if checked is None or checked.iteration != iteration:
            return pd.DataFrame()
        frame: pd.DataFrame = self.store.read_shard(checked.data).to_pandas()
        return frame

    def metrics(self, last: int | None = None, damaged: OnDamage = refuse) -> pd.DataFrame:
        """Returns the metrics of the newest `last` closed iterations, or of all, one row per iteration. Reads one index
        for each."""
        import pandas as pd

        rows = self.metric_rows(last, damaged)
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["iteration"])

    def metric_rows(self, last: int | None = None, damaged: OnDamage = refuse) -> list[dict[str, float]]:
        """Returns the same as `metrics`, as a mapping per iteration of the metrics that it has."""
        closed = self.state.iteration
        rows = []
        for iteration in range(0 if last is None else max(0, closed - last), closed):
            try:
                rows.append(self.metrics_of(self.store.index_of(iteration)))
            except Corrupt as damage:
                damaged(damage)
        return rows

    def metrics_of(self, closed: ObjectRef) -> dict[str, float]:
        """Returns the metrics of a closed iteration by name, and `iteration`. `closed` is from `RunStore.index_of`."""
        index = self.store.log.load_index(closed)
        return {"iteration": index.iteration, **index.metric_values}

    def progress(self, iteration: int) -> dict[str, str]:
        """Returns the progress of an iteration by stage: ``✓`` complete, ``–`` skipped, or shards such as ``2/4``.

        Stages without commits are absent.
        """
        state = self.store.iteration_state(iteration)
        progress = {name: "✓" if isinstance(commit, StageCommit) else "–" for name, commit in state.stages.items()}
        for name, shards in state.shards.items():
            progress.setdefault(name, f"{len(shards)}/{self._shards_of(name)}")
        return progress

    def _shards_of(self, stage: str) -> str:
        """Returns the number of shards of a stage; with dynamic sampling, the maximum."""
        # depends on the prompt file
        if stage == VALIDATE:
            return "?"
        return str(-(-self.config.max_prompts // self.config.rollout.prompts_per_shard))

    def newest_snapshot(self) -> int:
        """Returns the version of the newest snapshot. Raises `UserError` if the run has none."""
        self._require_weights()
        version = max(self.state.snapshots, default=None)
        if version is None:
            raise UserError(f"{self.store.url} has no snapshot yet: checkpoint.every says how often one is taken")
        return version

    def deciding_scores(self, first: int = 0) -> dict[int, float]:
        """Returns the validation scores by which the run may end early (`RunConfig.ends_early`), from iteration `first`
        on.

        Empty without `validation.patience`, so that nothing is read.
        """
        config = self.config
        if config.validation.patience is None:
            return {}
        validated = filter(config.validates, range(first, self.state.iteration))
        return self.store.validation_scores(validated, config.validation.metric)

    def best_snapshot(self) -> int:
        """Returns the version of the snapshot with the best validation, by `validation.metric`. Reads one index per
        validation.

        Reports a better validation that has no snapshot. Raises `UserError` if no snapshot was validated.
        """
        self._require_weights()
        versions = {*filter(self.config.validates, range(self.state.iteration)), self.state.iteration}
        scores = self.store.validation_scores(versions | self.state.snapshots.keys(), self.config.validation.metric)

        def score(version: int) -> tuple[float, int]:
            return scores[version], version

        best = max(scores, key=score, default=0)
        kept = [version for version in scores if version in self.state.snapshots]
        if not kept:
            gone = f"; {self._without_snapshot(best)}" if scores else ""
            raise UserError(
                f"no snapshot of {self.store.url} was validated{gone}: set checkpoint.keep.best and validation.every, "
                "or choose one with --iteration"
            )
        chosen = max(kept, key=score)
        if scores[best] > scores[chosen]:
            note(
                f"{self._without_snapshot(best)}; of the snapshots that were validated, the one after {chosen} "
                f"iterations is the best ({scores[chosen]:.4g} instead of {scores[best]:.4g}). checkpoint.keep.best=1 "
                "keeps the best one of a run"
            )
        return chosen

    def _require_weights(self) -> None:
        if not self.is_fit:
            self.config.require_weights()

    def _without_snapshot(self, version: int) -> str:
        """Explains how to get the best weights, whose snapshot is not kept."""
        if not version:
            return f"the best validation was that before training, whose weights are in {self.config.model.path}"
        snapshots, name = sorted(self.state.snapshots), self.store.url.rpartition("/")[2]
        place = bisect(snapshots, version)
        near = snapshots[max(place - 1, 0) : place + 1]
        again = (
            f"`ratchet fork {name} --at {version - 1}:{UPDATE_ACTOR} --run NEW train.iterations={version}`, then "
            "`ratchet resume NEW`"
        )
        return (
            f"the best validation was that after {version} iterations, which have no snapshot (the nearest: "
            f"{' and '.join(map(str, near)) or 'none'}); {again} compute them again"
        )

    def exportable(self, version: int, role: str = "actor", *, adapter: bool = False) -> Checkpoint:
        """Returns the checkpoint that `export` would write.

        Raises:
            UserError: the run is a fine-tuning run, or the snapshot, role or adapter does not exist.
        """
        if self.is_fit:
            assert self.state.claim is not None
            output = self.state.claim.config["output"]
            raise UserError(
                f"{self.store.url} is a fit, whose model is already in {output}: `hf upload` shares a folder"
            )
        self.config.require_weights()
        if version not in self.state.snapshots:
            versions = ", ".join(map(str, sorted(self.state.snapshots))) or "none"
            raise UserError(
                f"there is no snapshot after {counted(version, 'iteration')}; existing snapshots: {versions}"
            )
        if role not in self.state.snapshots[version]:
            roles = ", ".join(self.state.snapshots[version])
            raise UserError(f"snapshot {version} has no {role}; it has: {roles}")
        checkpoint = self.store.checkpoint(self.state.snapshots[version][role])
        if adapter and ADAPTER_CONFIG not in checkpoint.files:
            raise UserError(f"the {role} has no adapter: model.lora is null; leave --adapter out")
        return checkpoint

    def export(
        self,
        version: int,
        folder: str | Path,
        role: str = "actor",
        *,
        adapter: bool = False,
        is_published: bool = False,
    ) -> Path:
        """Writes a snapshot as a Hugging Face model folder with its tokenizer and a model card, and returns the folder.

        Args:
            folder: created if it does not exist.
            adapter: write only the LoRA adapters, in PEFT's format. By default they are merged into the model.
            is_published: if the base model of adapters is a local folder, name only the last part of its path. By
                default the whole path is named, so that they can be loaded on this machine.

        Raises:
            UserError: as `exportable`, or the base model has changed.
        """
        checkpoint = self.exportable(version, role, adapter=adapter)
        from ratchet.rlhf.models.hub_layout import copy_weights
        from ratchet.rlhf.models.loading import load_actor, load_critic, save
        from ratchet.rlhf.models.model_folders import (
            GENERATION_CONFIG,
            copy_code,
            hub_name,
            initial_digest,
            model_folder,
        )
        from ratchet.rlhf.models.tokenizers import copy_tokenizer
        from ratchet.rlhf.weights.stored_state import StoredState

        target, base = Path(folder), self.config.model_of(role)
        source = model_folder(self.config.model)
        if target.resolve() in (source.resolve(), Path(base.path).resolve()):
            raise UserError(f"{folder} is the model that the run started from: name another folder")
        target.mkdir(parents=True, exist_ok=True)
        names = [name for name in checkpoint.files if name.startswith(("config", "model", "adapter"))]
        files = self.store.read_checkpoint(checkpoint, names)
        named_base = None
        if adapter:
            folder_of_base = str(Path(base.path).absolute())
            named_base = hub_name(base) or (published_text(folder_of_base) if is_published else folder_of_base)
        if ADAPTER_CONFIG in files and not adapter:
            seed = self.config.run.seed
            if initial_digest(base, seed) != self.state.initial[role].digest:
                raise UserError(f"{base.path} is not the base model of the run's adapters: restore its files")
            consent.require(self.config, models_only=True)
            model = load_critic(base, seed) if is_critic(role) else load_actor(base, seed)
            copy_weights(StoredState.of(files).tensors(), model)
            _remove_weights(target)
            save(model, target)
        else:
            _remove_weights(target)
            for name, data in files.items():
                (target / name).write_bytes(data)
            if named_base is not None:
                # The stored config names no task, and its base model is the folder of a download.
                task = "TOKEN_CLS" if is_critic(role) else "CAUSAL_LM"
                settings = json.loads(files[ADAPTER_CONFIG]) | {
                    "base_model_name_or_path": named_base,
                    "task_type": task,
                }
                (target / ADAPTER_CONFIG).write_text(json.dumps(settings, sort_keys=True, indent=1))
        copy_code(base, target)
        copy_tokenizer(self.config.model, target)
        if (generation := source / GENERATION_CONFIG).is_file():
            shutil.copyfile(generation, target / GENERATION_CONFIG)
        self._write_card(target / CARD, checkpoint, named_base)
        return target

    def _write_card(self, path: Path, checkpoint: Checkpoint, base: str | None) -> None:
        """Writes the model card of an export."""
        from ratchet.infra.runs.model_card import model_card

        try:
            path.write_text(model_card(self, checkpoint, base), encoding="utf-8")
        except Corrupt as damage:
            path.unlink(missing_ok=True)  # the card of an earlier export
            # the export is still good without it
            note(f"the folder gets no model card: {damage}")

    def _iteration(
        self, state: RunState, by_stage: dict[str, tuple[str, ...]], wanted: Sequence[str], tolerant: bool
    ) -> pd.DataFrame:
        """Returns the wanted columns of one iteration, if `tolerant` without those of a stage that has no data."""
        import pandas as pd

        joined: pd.DataFrame | None = None
        for stage, stage_columns in by_stage.items():
            columns = [name for name in wanted if name in stage_columns]
            if not columns and not (stage == "generate" and joined is None):
                continue
            frame = self._stage_frame(state, stage, ["trajectory_id", *columns])
            if frame is None:
                if tolerant and joined is not None:
                    continue
                return pd.DataFrame()
            joined = frame if joined is None else joined.merge(frame, on="trajectory_id", how="inner")
        assert joined is not None
        order = [name for name in wanted if name in joined.columns]
        return joined[order].assign(iteration=state.iteration)[["iteration", *order]]

    def _stage_frame(self, state: RunState, stage: str, columns: Sequence[str] | None) -> pd.DataFrame | None:
        refs = self.store.shards_of(state, stage)
        if not refs:
            return None
        shards = [self.store.read_shard(ref, columns) for ref in refs]
        table = pa.concat_tables(shards, promote_options="default")  # a file may lack columns
        return frame_of(table)
