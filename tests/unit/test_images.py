"""Rows with images become prompts, in the forms of OpenAI, the package datasets, verl and TRL."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ratchet.infra.execution.preflight.prompts import check_prompts
from ratchet.rlhf.config import DataConfig, ModelConfig, RewardConfig
from ratchet.rlhf.data import images
from ratchet.rlhf.data.examples import example_of, pair_of
from ratchet.rlhf.data.expert_answers import ExpertAnswers
from ratchet.rlhf.data.files import data_digest, digest
from ratchet.rlhf.data.formats import messages_of, question_of
from ratchet.rlhf.data.images import check_image, digest_of
from ratchet.rlhf.data.prompts import Prompt, PromptDataset
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.tokenizers import load_tokenizer
from tests import tiny


def picture(color: str, kind: str = "PNG", size: tuple[int, int] = (24, 16)) -> bytes:
    written = BytesIO()
    Image.new("RGB", size, color).save(written, kind)
    return written.getvalue()


RED, BLUE = picture("red"), picture("blue", "JPEG")
RED_URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of data, with two pictures in a folder beside it."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "pictures" / "blue.jpg").write_bytes(BLUE)
    return tmp_path


def prompts(folder: Path, *rows: Any) -> list[Prompt]:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return list(PromptDataset([path]))


def user(*parts: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
        }
    ]


def seen(prompt: Prompt) -> tuple[list[str], tuple[bytes, ...]]:
    """The contents and the images of a prompt, whose messages name the digests of the images at the marks."""
    digests = [digest for message in prompt.messages for digest in message.get("images", [])]
    assert digests == [digest_of(image) for image in prompt.images]
    for message in prompt.messages:
        assert "images" not in message or message["content"].count("<image>") == len(message["images"])
    return [message["content"] for message in prompt.messages], prompt.images


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": RED_URL, "detail": "low"}},
        {"type": "image_url", "image_url": RED_URL},
        {"type": "input_image", "image_url": "pictures/red.png"},
        {"type": "image_url", "image_url": {"url": "file://FOLDER/pictures/red.png"}},
        {"type": "image", "image": "pictures/red.png"},
        {"type": "image", "image": "FOLDER/pictures/red.png"},
        {"type": "image", "path": "pictures/red.png"},
        {"type": "image", "url": RED_URL},
        {"type": "image", "base64": base64.b64encode(RED).decode()},
        {"type": "image", "image": {"bytes": base64.b64encode(RED).decode(), "path": None}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED_URL.partition(",")[2]}},
    ],
)
def test_a_part_of_a_content_gives_its_image(folder: Path, part: dict[str, Any]) -> None:
    row = {"prompt": user("Which color has ", part, "?"), "answer": "red"}
    [prompt] = prompts(folder, json.loads(json.dumps(row).replace("FOLDER", str(folder))))
    assert seen(prompt) == (["Which color has <image>?"], (RED,))
    assert prompt.ground_truth == "red"


def test_a_part_of_bytes_or_of_a_picture_in_memory(folder: Path) -> None:
    """In a row that is in no file."""
    part = {"type": "image", "image": Image.open(BytesIO(RED))}
    row = question_of({"prompt": user({"type": "image", "bytes": BLUE}, part, "Which is red?")}, "row 1")
    assert row.images[0] == BLUE
    assert row.messages[0]["content"] == "<image><image>Which is red?"
    assert Image.open(BytesIO(row.images[1])).getpixel((3, 3)) == (255, 0, 0)


def test_an_image_in_a_store(folder: Path) -> None:
    with fsspec.open("memory://pictures/blue.jpg", "wb") as file:
        file.write(BLUE)
    [prompt] = prompts(folder, {"prompt": "Which color?", "images": ["memory://pictures/blue.jpg"]})
    assert seen(prompt) == (["<image>Which color?"], (BLUE,))


def test_relative_paths_begin_at_the_url_of_the_data() -> None:
    with fsspec.open("memory://data/pictures/red.png", "wb") as file:
        file.write(RED)
    with fsspec.open("memory://data/rows.jsonl", "w") as file:
        file.write(json.dumps({"prompt": "Which color?", "image": "pictures/red.png"}))
    [prompt] = PromptDataset(["memory://data/rows.jsonl"])
    assert prompt.images == (RED,)


COLUMN = ["pictures/red.png", {"bytes": None, "path": "pictures/blue.jpg"}]
SYSTEM, ASKED = {"role": "system", "content": "Look."}, {"role": "user", "content": "Which is red?"}


@pytest.mark.parametrize(
    ("messages", "contents"),
    [
        # verl's: marks in the texts
        (
            [SYSTEM, {"role": "user", "content": "A <image> or\n<image>?"}],
            ["Look.", "A <image> or\n<image>?"],
        ),
        (
            [
                {"role": "user", "content": "<image>1"},
                {"role": "assistant", "content": "Red"},
                {"role": "user", "content": "<image>2"},
            ],
            ["<image>1", "Red", "<image>2"],
        ),
        # TRL's: parts without data, and nothing that says where
        (
            [SYSTEM, *user({"type": "image"}, {"type": "image", "text": None}, "Which?")],
            ["Look.", "<image><image>Which?"],
        ),
        ([SYSTEM, ASKED], ["Look.", "<image><image>Which is red?"]),
        ("Which is red?", ["<image><image>Which is red?"]),
        # some have data, others the column's
        (
            user({"type": "image", "image": RED_URL}, {"type": "image"}, "or", {"type": "image"}),
            ["<image><image>or<image>"],
        ),
    ],
)
def test_the_images_of_a_row_stand_where_its_messages_say(folder: Path, messages: Any, contents: list[str]) -> None:
    [prompt] = prompts(folder, {"prompt": messages, "images": COLUMN})
    found, shown = seen(prompt)
    assert found == contents
    assert shown[-2:] == (RED, BLUE)
    assert len(shown) == "".join(contents).count("<image>")


def test_images_are_no_part_of_what_rewards_read(folder: Path) -> None:
    """Their bytes would be in each trajectory's row."""
    [prompt] = prompts(folder, {"problem": "<image>Which?", "images": [RED_URL], "level": 3, "answer": "red"})
    assert json.loads(prompt.extra_info) == {"level": 3, "answer": "red"}


def test_a_mark_without_images_is_a_text(folder: Path) -> None:
    [spelled] = prompts(folder, {"prompt": "What does <image> mean in HTML?", "images": []})
    assert seen(spelled) == (["What does <image> mean in HTML?"], ())
    assert "images" not in spelled.messages[0]


def test_llava_s_rows(folder: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhich color?"}, {"from": "gpt", "value": "red"}]
    [prompt] = prompts(folder, {"image": "pictures/red.png", "conversations": turns})
    assert seen(prompt) == (["<image>\nWhich color?"], (RED,))
    assert prompt.ground_truth == "red"


def test_a_table_that_pyarrow_writes(folder: Path) -> None:
    """As verl's geo3k; each part has the keys of all others."""
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    part = pa.struct({"type": pa.string(), "text": pa.string(), "image": image})
    message = pa.struct({"role": pa.string(), "content": pa.list_(part)})
    row = {
        "prompt": user({"type": "image", "image": {"bytes": RED}}, "or", {"type": "image"}),
        "images": [{"bytes": BLUE}],
        "answer": "red",
    }
    schema = pa.schema({"prompt": pa.list_(message), "images": pa.list_(image), "answer": pa.string()})
    pq.write_table(pa.Table.from_pylist([row, row], schema), folder / "rows.parquet")
    for prompt in PromptDataset([folder / "rows.parquet"]):
        assert seen(prompt) == (["<image>or<image>"], (RED, BLUE))


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_the_image_features_of_datasets(folder: Path, ending: str) -> None:
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Feature

    features = Features({"problem": Value("string"), "images": List(Feature()), "answer": Value("string")})
    rows = {
        "problem": ["<image>Which color?", "<image> or <image>?"],
        "images": [
            [Image.open(BytesIO(RED))],
            [str(folder / "pictures" / "red.png"), {"bytes": BLUE, "path": "b.jpg"}],
        ],
        "answer": ["red", "both"],
    }
    made = Dataset.from_dict(rows, features)
    if ending == "parquet":
        made.to_parquet(folder / "rows.parquet")
    else:
        made.save_to_disk(folder / "rows")
    path = folder / "rows.parquet" if ending == "parquet" else next((folder / "rows").glob("*.arrow"))
    first, second = PromptDataset([path])
    assert seen(first)[0] == ["<image>Which color?"]
    assert Image.open(BytesIO(first.images[0])).getpixel((3, 3)) == (255, 0, 0)
    assert seen(second) == (["<image> or <image>?"], (RED, BLUE))


TRUNCATED = base64.b64encode(picture("red", "PNG", (300, 300))[:-40]).decode()
MISTAKES: list[tuple[Any, str]] = [
    (
        {"prompt": "?", "images": ["a.png"]},
        ": image 1 does not exist (FOLDER/a.png): put it there, or correct its path, which",
    ),
    ({"prompt": "?", "image": "/no/a.png"}, ": image 1 does not exist (/no/a.png): put it there, or correct its path"),
    (
        {"prompt": "?", "image": "https://a.org/a.png"},
        ": image 1 is at https://a.org/a.png, and a run reads no images from",
    ),
    (
        {"prompt": user({"type": "image_url", "image_url": {"url": "HTTP://a.org/a.png"}})},
        ": image 1 is at HTTP://a.org/a.png",
    ),
    ({"prompt": "?", "image": "simplecache::https://a.org/a.png"}, ": image 1 is at simplecache::https"),
    ({"prompt": "?", "image": "nothing://a.png"}, ": image 1 cannot be read (nothing://a.png: "),
    ({"prompt": "?", "image": "pictures"}, ": image 1 cannot be read (FOLDER/pictures: "),
    ({"prompt": "?", "images": ["pictures/red.png", {"bytes": "?"}]}, ": image 2 is not base64 ("),
    (
        {"prompt": "?", "images": ["data:image/png,x"]},
        ": image 1 is a data: URL without base64: write data:image/png;ba",
    ),
    (
        {"prompt": "?", "images": ["pictures/red.png", None]},
        ": image 2 is empty: write a path, a data: URL, or an object",
    ),
    ({"prompt": "?", "images": [[RED_URL]]}, ": image 1 is ['data:image/png;base64,"),
    ({"prompt": "?", "images": [{"size": 3}]}, ": image 1 is empty, or has another form: write a path, a data: URL"),
    (
        {"prompt": "?", "images": [{"image": "a.png", "max_pixels": 9}]},
        ": image 1 has max_pixels, and images are resized by",
    ),
    (
        {"prompt": "<image>?", "images": ["pictures/red.png"] * 2},
        " has 2 images in its columns, and its messages have 1 place for them (<image>, or an image part without data)",
    ),
    (
        {"prompt": "<image> and <image>?", "images": ["pictures/red.png"]},
        " has 1 image in its columns, and its messages have 2 places for them",
    ),
    ({"prompt": user({"type": "image"}, "?")}, " has 0 images in its columns, and its messages have 1 place for them"),
    (
        {"prompt": user({"type": "image", "image": RED_URL}), "image": RED_URL},
        " has 1 image in its columns, and its messages have 0 pl",
    ),
    (
        {"prompt": "?", "image": RED_URL, "images": [RED_URL]},
        " has images and image: write all of its images into images",
    ),
    (
        {"prompt": [SYSTEM], "image": RED_URL},
        " has images, and no message of the user: write <image> where they belong",
    ),
    (
        {"prompt": user({"type": "image", "url": RED_URL}, "<image>")},
        ": prompt[0] (user) has images, and its text spells",
    ),
    (
        {"prompt": [{**ASKED, "images": ["a.png"]}]},
        ': prompt[0] has images: write each as a part of its content, {"type": ',
    ),
]


@pytest.mark.parametrize(("row", "says"), MISTAKES)
def test_a_mistake_is_one_line_with_file_and_row(folder: Path, row: Any, says: str) -> None:
    with pytest.raises(UserError) as refused:
        prompts(folder, {"prompt": "1 + 1?"}, row)
    line = str(refused.value)
    assert line.startswith(f"{folder}/rows.jsonl, line 2{says.replace('FOLDER', str(folder))}")
    assert line.isprintable()


def test_what_the_policy_writes_has_no_images(folder: Path) -> None:
    answer = {"role": "assistant", "content": user({"type": "image", "url": RED_URL})[0]["content"]}
    for row in ({"messages": [ASKED, answer]}, {"prompt": [ASKED], "completion": [answer]}):
        with pytest.raises(UserError, match="has an image, where only texts may be"):
            prompts(folder, row)
    with pytest.raises(UserError, match="a: prompt has an image, where only texts may be"):
        messages_of(user({"type": "image", "url": RED_URL}), "a")


def test_examples_have_images_before_their_answer(folder: Path) -> None:
    answer = {"role": "assistant", "content": "It is red, no <image>."}
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>Which color?", "response": "red", "images": ["pictures/red.png"]},
        {"messages": [*user({"type": "image"}, "Which?"), answer], "images": ["pictures/red.png"]},
        {"prompt": [ASKED], "completion": [answer], "image": "pictures/red.png"},
    ]
    for row in rows:
        found = example_of(row, f"{folder}/rows.jsonl, line 1")
        assert found is not None
        chat, response = found
        assert chat.images == (RED,)
        assert chat.messages[0]["images"] == [digest_of(RED)]
        assert chat.messages[0]["content"].startswith("<image>Which")
        assert response in ("red", answer["content"])
    for row in ({"chosen": [ASKED, answer], "rejected": [ASKED, answer], "image": RED_URL}, pair_with_part(answer)):
        with pytest.raises(UserError, match=r"a, line 1(: the prompt of a pair)? has (an )?image"):
            list(pair_of(row, "a, line 1"))


def pair_with_part(answer: dict[str, str]) -> dict[str, Any]:
    return {"prompt": user({"type": "image", "url": RED_URL}), "chosen": [answer], "rejected": [answer]}


def test_an_experts_answer_to_another_image_is_to_another_prompt(folder: Path) -> None:
    tokenizer = load_tokenizer(tiny.config(tiny.workspace(folder)).model)
    path, answers = folder / "rows.jsonl", folder / "answers.jsonl"
    asked = [{"prompt": "1?", "image": image} for image in ("pictures/red.png", "pictures/blue.jpg")]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    given = [{"prompt": "1?", "image": image, "response": "2"} for image in ("pictures/blue.jpg", RED_URL)]
    answers.write_text("".join(f"{json.dumps(row)}\n" for row in [*given, {"prompt": "1?", "response": "2"}]))
    found = ExpertAnswers([str(answers)]).matched(PromptDataset([path]), tokenizer, system_prompt=None, max_tokens=5)
    assert found.by_row == {0: (1,), 1: (0,)}
    assert found.unknown == 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_an_image_is_decoded_to_its_end(kind: str) -> None:
    whole = picture("red", kind, (600, 400))
    check_image(whole, "image 1")
    with pytest.raises(UserError, match=r"^image 1 cannot be decoded \(.+\): write the image again"):
        check_image(whole[: len(whole) * 2 // 3], "image 1")


def test_files_that_are_no_images_or_of_a_format_that_starts_programs() -> None:
    postscript = BytesIO()
    Image.new("L", (4, 4)).save(postscript, "EPS")
    for data in (b"GIF of a cat", postscript.getvalue(), b"<svg/>"):
        with pytest.raises(UserError, match=r"^image 1 cannot be decoded \(it is none of PNG, JPEG, "):
            check_image(data, "image 1")


def test_too_large_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = picture("white", size=(2**13, 2**13 + 1))
    with pytest.raises(UserError, match=r"^image 1 has 8192 × 8193 pixels, more than the 67,108,864 that an image may"):
        check_image(wide, "image 1")
    monkeypatch.setattr(images, "MAX_BYTES", len(RED))
    (folder / "pictures" / "long.png").write_bytes(RED + b"x")
    assert len(prompts(folder, {"prompt": "?", "image": RED_URL}, {"prompt": "?", "image": "pictures/red.png"})) == 2
    long_url = f"data:image/png;base64,{base64.b64encode(RED + b'x').decode()}"
    for image in ("pictures/long.png", long_url):
        with pytest.raises(UserError, match=f"line 1: image 1 has more than the {len(RED)} bytes that an image may"):
            prompts(folder, {"prompt": "?", "image": image})


def test_all_mistakes_are_reported_before_a_start(folder: Path) -> None:
    """And each image is decoded, although prompts carry it encoded."""
    (folder / "pictures" / "cut.png").write_bytes(base64.b64decode(TRUNCATED))
    rows = [
        {"prompt": "1 + 1?", "answer": "2"},
        {"prompt": "a?", "answer": "1", "image": "pictures/none.png"},
        {"prompt": "a?", "answer": "1", "image": "pictures/cut.png"},
        {"prompt": "<image>a?", "answer": "1", "images": ["pictures/red.png"] * 2},
        {"prompt": "1 + 1?", "answer": "3"},
        *[{"prompt": "a?", "answer": "1", "image": f"{number}.png"} for number in range(7)],
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = tiny.model_folder(folder / "model")
    data = DataConfig(train=(str(path),), prompts_per_iteration=1)
    with pytest.raises(UserError) as refused:
        check_prompts(PromptDataset([path]), ModelConfig(path=str(model)), data, RewardConfig(function="gsm8k"), None)
    lines = str(refused.value).splitlines()
    named = [int(line.removeprefix(f"{path}, line ").partition(" ")[0].strip(":")) for line in lines[:8]]
    assert named == [2, 3, 4, 6, 7, 8, 9, 10]
    assert "image 1 cannot be decoded" in lines[1]
    assert lines[8:] == ["the images of 2 more prompts cannot be used either"]


def test_each_row_with_a_broken_image_is_named(folder: Path) -> None:
    """Also if others name the same image, and many are decoded at the same time."""
    (folder / "pictures" / "cut.png").write_bytes(base64.b64decode(TRUNCATED))
    path, broken = folder / "rows.jsonl", {5, 6, 150}
    names = ["cut.png" if number in broken else ("red.png", "blue.jpg")[number % 2] for number in range(200)]
    path.write_text("".join(f'{{"prompt": "1?", "answer": "1", "image": "pictures/{name}"}}\n' for name in names))
    model = tiny.model_folder(folder / "model")
    data = DataConfig(train=(str(path),), prompts_per_iteration=1)
    with pytest.raises(UserError) as refused:
        check_prompts(PromptDataset([path]), ModelConfig(path=str(model)), data, RewardConfig(function="gsm8k"), None)
    lines = [line for line in str(refused.value).splitlines() if "cannot be decoded" in line]
    assert [line.partition(": ")[0] for line in lines] == [f"{path}, line {number + 1}" for number in sorted(broken)]


def test_the_digest_of_the_data_covers_the_images_that_it_names(folder: Path) -> None:
    texts, named, inside = folder / "texts.jsonl", folder / "named.jsonl", folder / "inside.jsonl"
    texts.write_text(json.dumps({"prompt": "Draw an image."}) + "\n")
    named.write_text(json.dumps({"prompt": user({"type": "image", "path": "pictures/red.png"})}) + "\n")
    inside.write_text(json.dumps({"prompt": "?", "images": [RED_URL]}) + "\n")
    table = folder / "table.parquet"
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "?", "images": [{"bytes": None, "path": "pictures/red.png"}]}]), table
    )
    before = {path: data_digest(str(path)) for path in (texts, named, inside, table)}
    assert before[texts] == digest(str(texts)) and before[inside] == digest(str(inside))
    (folder / "pictures" / "red.png").write_bytes(BLUE)
    after = {path: data_digest(str(path)) for path in before}
    assert {path for path in before if before[path] != after[path]} == {named, table}
    assert PromptDataset([named]).digest != PromptDataset([inside]).digest
    (folder / "pictures" / "red.png").unlink()
    assert data_digest(str(named)) not in (before[named], after[named]), "the check of the prompts says what is missing"


LAZY = """
import sys, tracemalloc
import pyarrow as pa
from ratchet.rlhf.data import files

files.HELD_BYTES, files.BATCH_BYTES = 2**22, 2**21
tracemalloc.start()
rows = files.open_rows(sys.argv[1])
total = sum(len(row["images"][0]["bytes"]) for _, row in rows)
for index in range(len(rows) - 1, -1, -77):
    assert rows[index][1]["images"][0]["bytes"][:8] == f"{index:08d}".encode()
print(total, pa.default_memory_pool().max_memory(), tracemalloc.get_traced_memory()[1])
"""


def test_the_images_of_a_table_are_not_held_in_memory(tmp_path: Path) -> None:
    """Also if they are in one row group, as pandas writes them."""
    path, size, count = tmp_path / "rows.parquet", 2**13, 12_000  # pyarrow writes pages of 1024 values
    schema = pa.schema({"problem": pa.string(), "images": pa.list_(pa.struct({"bytes": pa.binary()}))})
    rows = [
        {"problem": f"<image> {number}?", "images": [{"bytes": f"{number:08d}".encode() + os.urandom(size - 8)}]}
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    assert pq.ParquetFile(path).num_row_groups == 1
    done = subprocess.run([sys.executable, "-c", LAZY, path], capture_output=True, text=True, check=True)
    total, arrow, python = map(int, done.stdout.split())
    assert total == count * size
    assert arrow < total / 3 and python < total / 10
