"""Images in a run's folder: stored once by content, found by forks, checked by verify, kept by vacuum while rows name
them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from ratchet.infra.execution.claims import run_json
from ratchet.infra.execution.neighbours import WORKERS
from ratchet.infra.runs.forks import fork
from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.vacuum import unreached, vacuum
from ratchet.infra.runs.verify import verify
from ratchet.infra.store.images import Images, key_of
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Journal, ShardCommit, sha256_of
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.errors import UserError
from tests import bare_run


def png(colour: str, width: int = 8, height: int = 6) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(sink, "PNG")
    return sink.getvalue()


RED, BLUE, GREEN = png("red"), png("blue"), png("green")


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    run = bare_run.claimed(f"{tmp_path}/runs/run")
    run.objects.put("run.json", run_json(run))
    return run


def rows_with(images: Sequence[str], iteration: int, shard: int) -> pa.Table:
    rows = bare_run.rows(iteration, shard)
    column = pa.array([list(images)] * len(rows), pa.list_(pa.string()))
    return rows.set_column(rows.column_names.index("images"), "images", column)


def commit(store: RunStore, *images: bytes) -> list[str]:
    """Closes an iteration of trajectories with these images."""
    iteration = store.state.iteration
    digests = [Images(store.objects).put(image) for image in images]
    data = store.write_shard(iteration, "generate", 0, 0, rows_with(digests, iteration, 0))
    shard = ShardCommit(iteration=iteration, stage="generate", shard=0, term=store.log.term, data=data, seconds=0.0)
    store.commit(shard, bare_run.complete(store, data))
    store.close({"reward/mean": 0.0})
    return digests


def path_of(store: RunStore, digest: str) -> Path:
    return Path(store.url) / "images" / digest


def test_an_image_is_stored_once_by_content(store: RunStore) -> None:
    images = Images(store.objects)
    digest = images.put(RED)
    assert digest == sha256_of(RED) and images.get(digest) == RED
    written = path_of(store, digest).stat()
    assert images.put(RED) == digest
    assert path_of(store, digest).stat().st_ino == written.st_ino, "nothing is written again"
    path_of(store, digest).write_bytes(RED[:20])
    assert images.put(RED) == digest
    assert images.get(digest) == RED, "what a crash has cut off is written again"


def test_what_is_missing_or_damaged_is_named(store: RunStore) -> None:
    images = Images(store.objects)
    digest = images.put(RED)
    path_of(store, digest).write_bytes(BLUE)
    with pytest.raises(UserError, match=rf"{path_of(store, digest)} is damaged: restore it from a backup"):
        images.get(digest)
    path_of(store, digest).unlink()
    with pytest.raises(UserError, match=rf"{path_of(store, digest)} is missing: restore it from a backup"):
        images.get(digest)


@pytest.mark.parametrize("digest", ["", "../run.json", "a" * 63, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61])
def test_what_is_no_digest_becomes_no_path(store: RunStore, digest: str) -> None:
    with pytest.raises(UserError, match="is no digest of an image"):
        Images(store.objects).get(digest)


def test_a_fork_finds_the_images_of_the_rows_that_it_shares(store: RunStore, tmp_path: Path) -> None:
    [red] = commit(store, RED)
    child = RunStore.at(f"{tmp_path}/runs/child")
    fork(store, child.objects, {}, 1, (), "1")
    grandchild = RunStore.at(f"{tmp_path}/runs/grandchild")
    fork(open_run(child.url).store, grandchild.objects, {}, 1, (), "1")
    child, grandchild = open_run(child.url).store, open_run(grandchild.url).store
    assert Images(grandchild.objects).get(red) == RED and not path_of(grandchild, red).exists()
    Images(grandchild.objects).put(RED)
    assert path_of(grandchild, red).exists(), "an ancestor's vacuum knows no rows of the fork"
    bare_run.claim(child)
    [blue] = commit(child, BLUE)
    with pytest.raises(UserError, match=f"run/images/{blue} is missing"):
        Images(store.objects).get(blue)
    path_of(store, red).unlink()
    with pytest.raises(UserError, match=f"child/images/{red} is missing"):
        Images(child.objects).get(red)


def test_verify_names_what_is_missing_and_damaged(store: RunStore) -> None:
    red, blue = commit(store, RED, BLUE)
    [green] = commit(store, GREEN)
    assert list(verify(store)) == []
    path_of(store, red).unlink()
    path_of(store, blue).write_bytes(RED)
    found = {(finding.key, finding.what) for finding in verify(store) if not finding.harmless}
    assert found == {(key_of(red), "is gone"), (key_of(blue), "is damaged")}
    [unnamed] = [Images(store.objects).put(png("yellow"))]
    harmless = {finding.key: finding.means for finding in verify(store) if finding.harmless}
    assert harmless == {key_of(unnamed): "`ratchet vacuum` deletes it"}
    assert path_of(store, green).exists()


def test_a_fork_whose_own_rows_name_an_ancestors_image_is_whole(store: RunStore, tmp_path: Path) -> None:
    [red] = commit(store, RED)
    child = RunStore.at(f"{tmp_path}/runs/child")
    fork(store, child.objects, {}, 1, (), "1")
    child = open_run(child.url).store
    bare_run.claim(child)
    commit(child, RED)
    path_of(child, red).unlink()
    assert list(verify(child)) == []
    path_of(store, red).unlink()
    assert [finding.what for finding in verify(child)] == ["is gone"]


def test_vacuum_deletes_only_images_that_no_row_names(store: RunStore) -> None:
    red, blue = commit(store, RED, BLUE)
    yellow = Images(store.objects).put(png("yellow"))
    assert unreached(store) == [key_of(yellow)]
    assert vacuum(store) == [key_of(yellow)]
    assert {path.name for path in (Path(store.url) / "images").iterdir()} == {red, blue}
    assert list(verify(store)) == []


def test_vacuum_keeps_images_that_messages_name(store: RunStore) -> None:
    digest = Images(store.objects).put(RED)
    rows = bare_run.rows(0, 0)
    said = pa.array([f'[{{"role": "user", "content": "<image>", "images": ["{digest}"]}}]'] * len(rows))
    rows = rows.set_column(rows.column_names.index("messages"), "messages", said)
    data = store.write_shard(0, "generate", 0, 0, rows)
    shard = ShardCommit(iteration=0, stage="generate", shard=0, term=store.log.term, data=data, seconds=0.0)
    store.commit(shard, bare_run.complete(store, data))
    assert vacuum(store) == []


def test_vacuum_keeps_all_images_while_a_shard_is_incomplete(store: RunStore) -> None:
    commit(store, RED)
    digest = Images(store.objects).put(BLUE)
    part = store.write_journal(1, "generate", 0, bare_run.rows(1, 0))
    store.replace_journal(Journal(iteration=1, stage="generate", term=store.log.term, parts=(part,)))
    assert vacuum(store) == [] and path_of(store, digest).exists()
    assert key_of(digest) not in [finding.key for finding in verify(store)]


def test_vacuum_keeps_all_images_beside_a_rollout_worker(store: RunStore) -> None:
    commit(store, RED)
    digest = Images(store.objects).put(BLUE)
    store.objects.put(f"{WORKERS}one.json", b"{}")
    assert vacuum(store) == [] and path_of(store, digest).exists()


def test_vacuum_keeps_all_images_if_rows_cannot_be_read(store: RunStore) -> None:
    commit(store, RED)
    digest = Images(store.objects).put(BLUE)
    [file] = (Path(store.url) / "trajectories/generate").rglob("*.parquet")
    file.write_bytes(file.read_bytes()[:-1])
    assert vacuum(store) == [] and path_of(store, digest).exists()
    assert [(finding.key.rpartition("/")[2], finding.what) for finding in verify(store)] == [(file.name, "is damaged")]


def test_a_run_that_was_moved_has_its_images(store: RunStore, tmp_path: Path) -> None:
    [red] = commit(store, RED)
    shutil.move(store.url, tmp_path / "elsewhere")
    assert Images(ObjectStore(f"{tmp_path}/elsewhere")).get(red) == RED
