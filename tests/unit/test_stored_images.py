"""Images in a run's folder: stored once by content, found by forks, checked by verify, kept by vacuum while rows name
them."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from ratchet import observe
from ratchet.infra.execution.claims import run_json
from ratchet.infra.execution.neighbours import WORKERS
from ratchet.infra.runs import embedded_images
from ratchet.infra.runs.embedded_images import with_images
from ratchet.infra.runs.forks import fork
from ratchet.infra.runs.joined_rows import JoinedRows
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.runs.training_data import dataset
from ratchet.infra.runs.vacuum import unreached, vacuum
from ratchet.infra.runs.verify import verify
from ratchet.infra.store.images import Images, key_of
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Journal, ShardCommit, sha256_of
from ratchet.infra.store.run_store import RunStore, parquet_bytes
from ratchet.rlhf.data.placeholders import first_images, folds_of, parts_of
from ratchet.rlhf.data.selection import Kind, Selection
from ratchet.rlhf.errors import UserError
from tests import bare_run
from tests.pictures import PAD, observed, picture

RED, BLUE, GREEN = picture("red"), picture("blue"), picture("green")


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
    [unnamed] = [Images(store.objects).put(picture("yellow"))]
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
    yellow = Images(store.objects).put(picture("yellow"))
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


@pytest.fixture
def pictured(tmp_path: Path) -> Run:
    return observed(f"file://{tmp_path}/runs", "pictures")


def test_images_become_features_of_a_dataset(pictured: Run, tmp_path: Path) -> None:
    from datasets import load_dataset

    rows = JoinedRows(pictured).table(1, "train")
    assert rows is not None
    written = parquet_bytes(with_images(rows, Images(pictured.store.objects)))
    (tmp_path / "rows.parquet").write_bytes(written)
    loaded = load_dataset(
        "parquet", data_files=str(tmp_path / "rows.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    sizes = [[image.size for image in row["images"]] for row in loaded]
    assert sizes == [[(24, 16)], [(24, 16), (24, 16)], [(900, 600)]]
    assert loaded[1]["images"][1].getpixel((0, 0))[1] > 100, "green"


def test_an_image_of_many_rows_is_once_in_a_file(store: RunStore) -> None:
    images = Images(store.objects)
    noise = images.put(random.Random(0).randbytes(100_000))
    table = pa.table({"images": pa.array([[noise]] * 64, pa.list_(pa.string()))})
    assert len(parquet_bytes(with_images(table, images))) < 110_000


def test_large_columns_are_in_parts(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_images, "PART_BYTES", 170)
    images = Images(store.objects)
    cells = [[images.put(RED)], None, [images.put(BLUE), images.put(RED)], []]
    table = with_images(pa.table({"images": pa.array(cells, pa.list_(pa.string()))}), images)
    assert table["images"].num_chunks == 2
    stored = [None if cell is None else [image["bytes"] for image in cell] for cell in table["images"].to_pylist()]
    assert stored == [[RED], None, [BLUE, RED], []]


def test_a_run_gives_the_bytes_of_an_image(pictured: Run) -> None:
    digests = pictured.trajectories([0], ["images"])["images"]
    assert Image.open(io.BytesIO(pictured.image(digests[2][0]))).size == (900, 600)
    with pytest.raises(UserError, match="is no digest"):
        pictured.image("red")


def test_sql_sees_the_digests(pictured: Run) -> None:
    found = pictured.query(
        "select response, len(images) as n, images[1] as first from trajectories where iteration = 1"
    )
    assert found["n"].tolist() == [1, 2, 1] and found["first"][0] == sha256_of(picture("red"))


def test_a_dataset_of_a_run_has_its_images(store: RunStore, tmp_path: Path) -> None:
    red, blue = picture("red"), picture("blue")

    def row(image: bytes, response: str) -> dict[str, object]:
        asked = [{"type": "image", "image": image}, {"type": "text", "text": " which colour?"}]
        return {"messages": [{"role": "user", "content": asked}], "response": response, "finish_reason": "stop"}

    with observe.start("asked", f"file://{tmp_path}/runs", trainer="mine") as run:
        step = run.step(0).write("generate", [row(red, "red"), row(red, "blue"), row(blue, "blue"), row(blue, "red")])
        step.write("score", [{"score": score} for score in (1.0, 0.0, 1.0, 0.0)]).close()
    made = dataset([open_run(f"{tmp_path}/runs/asked")], Selection(Kind.dpo)).table
    assert [row["prompt"][0]["content"] for row in made.to_pylist()] == ["<image> which colour?"] * 2
    assert [[image["bytes"] for image in cell] for cell in made["images"].to_pylist()] == [[red], [blue]]
    assert {b"ratchet", b"huggingface"} <= set(made.schema.metadata)
    assert [row["chosen"][0]["content"] for row in made.to_pylist()] == ["red", "blue"]


def test_observed_messages_keep_what_is_not_in_the_row(tmp_path: Path) -> None:
    elsewhere = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}
    ]
    inside = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(RED).decode()}"}}
    rows = [
        {"messages": elsewhere, "response": "a"},
        {
            "messages": [{"role": "user", "content": [inside, "and", {"type": "image"}]}],
            "images": [BLUE],
            "response": "b",
        },
        {"prompt": "<image>?", "images": [Image.new("RGB", (3, 4)), {"bytes": GREEN, "path": None}], "response": "c"},
    ]
    with observe.start("given", f"file://{tmp_path}/runs", trainer="mine") as run:
        run.step(0).write("generate", rows).close()
    run_ = open_run(f"{tmp_path}/runs/given")
    found = run_.trajectories(0, ["messages", "images"])
    assert json.loads(found["messages"][0]) == elsewhere and found["images"][0] is None
    digests = [sha256_of(RED), sha256_of(BLUE)]
    assert json.loads(found["messages"][1]) == [{"role": "user", "content": "<image>and<image>", "images": digests}]
    assert list(found["images"][1]) == digests
    first, second = found["images"][2]
    assert Image.open(io.BytesIO(run_.image(first))).size == (3, 4) and second == sha256_of(GREEN)
    assert list(verify(run_.store)) == []


@pytest.mark.parametrize(("image", "says"), [("a.png", "str is no image"), (b"GIF89a", "an image cannot be decoded")])
def test_what_is_no_image_is_refused(
    image: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with observe.start("wrong", f"file://{tmp_path}/runs", trainer="mine") as run:
        run.step(0).write("generate", [{"response": "a", "images": [image]}]).close()
    assert "step 0 is not stored: stage generate, row 0" in (said := capsys.readouterr().err) and says in said


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        (f"a<|vision_start|>{PAD * 3}<|vision_end|><|vision_start|>{PAD}<|vision_end|>b", [3, 1]),
        (
            "<fake_token_around_image><row_1_col_1><image><image>\n<fake_token_around_image><global-img><image><image>"
            "<fake_token_around_image>What",
            [9],
        ),
        ("<start_of_image><image_soft_token><image_soft_token><end_of_image> <image>", [2, 1]),
        ("[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END][IMG][IMG_END]", [5, 1]),
        ("<img><IMG_CONTEXT><IMG_CONTEXT></img>", [2]),
        ("1 < 2 > 0, <b>an image</b>", []),
    ],
)
def test_runs_of_tokens_for_images(text: str, runs: list[int]) -> None:
    parts = parts_of(text, 0)
    assert [part.tokens for part in parts if part.tokens] == runs
    assert [part.image for part in parts if part.tokens] == list(range(len(runs)))
    assert [part.tokens for part in parts_of(text, None) if part.tokens] == [size for size in runs if size > 1]


def test_texts_tell_which_image_only_if_each_has_a_run() -> None:
    assert first_images(PAD, f"a{PAD}", 2) == (0, 1)
    assert first_images(f"{PAD} {PAD}", "", 3) == (None, None)
    tokens = ["a", PAD, PAD, "b", "", PAD, "c"]
    assert [(fold.start, fold.end, fold.image) for fold in folds_of(tokens, 1)] == [(1, 3, 1), (5, 6, 2)]
