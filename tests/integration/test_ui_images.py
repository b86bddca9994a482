"""Images in a real Chromium: beside the tokens, in lists and reports, in place of their tokens, and safely served."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

from ratchet.flows import report
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.store.images import Images
from tests import tiny
from tests.browser import chromium, opened, served, visit, wait_until
from tests.pictures import PAD, observed, picture

SIZES = """selector => [...document.querySelectorAll(selector)].filter(image => image.complete)
    .map(image => [image.naturalWidth, image.naturalHeight])"""
SHOWN = f"([selector, expected]) => JSON.stringify(({SIZES})(selector)) === JSON.stringify(expected)"
RED, GREEN, BLUE = [24, 16], [24, 16], [900, 600]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pictures")
    model = tiny.model_folder(folder / "model", letters=[*"abcdehilnorstuvw ?:<>&;", PAD])
    return observed(f"file://{folder}/runs", "pictures", model)


@pytest.fixture(scope="module")
def url(run: Run) -> Iterator[str]:
    with served(run.store.url.rpartition("/")[0]) as address:
        yield address


@pytest.fixture(scope="module")
def browser(run: Run) -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with opened(browser) as empty:
        yield empty


def wait_for_images(page: Page, selector: str, *sizes: list[int]) -> None:
    """Waits until the browser has decoded these pictures."""
    page.wait_for_selector(selector)
    wait_until(page, SHOWN, [selector, list(sizes)])


def test_a_trajectory_shows_its_images(page: Page, url: str) -> None:
    visit(page, f"{url}#run=pictures&id=it000001-p00000-s01&iteration=1&view=answers")
    wait_for_images(page, "#reader figure img", RED, GREEN)
    captions = page.locator("#reader figcaption").all_inner_texts()
    assert [caption.rpartition(",")[0] for caption in captions] == [
        f"image 1 · 24×16 PNG, {len(picture('red'))} B",
        f"image 2 · 24×16 WEBP, {len(picture('green', kind='WEBP'))} B",
    ]


def test_runs_of_image_tokens_are_one_chip(page: Page, url: str) -> None:
    visit(page, f"{url}#run=pictures&id=it000001-p00000-s01&iteration=1&view=answers")
    page.wait_for_selector("#reader pre.prompt .chip")
    assert page.inner_text("#reader pre.prompt") == (
        "user: <|vision_start|>image 1 · 12 tokens<|vision_end|>which colour? <b>&amp;"
    )
    assert page.inner_text("#reader pre.response") == "see image 2 · 5 tokens no"
    colours = page.evaluate("[...document.querySelectorAll('#reader .token')].map(token => token.title)")
    assert len(colours) == len("see  no") and set(colours) == {"advantage -0.5"}
    page.focus("#reader pre.response")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#reader .told").startswith(f'token 8 "{PAD}"')
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#reader .told").startswith('token 9 " "'), "a place is that of a token, not of an element"


def test_a_list_shows_small_copies(page: Page, url: str) -> None:
    visit(page, f"{url}#run=pictures&view=answers&iteration=1")
    wait_for_images(page, "#list .thumbnails img", RED, RED, GREEN, [96, 64])
    page.fill("[name=where]", "len(images) = 2")
    wait_for_images(page, "#list .thumbnails img", RED, GREEN)


def test_a_group_holds_the_answers_about_one_picture(run: Run) -> None:
    groups = run.trajectories([0], ["trajectory_id", "images"])
    assert groups["trajectory_id"].tolist() == ["it000000-p00000-s00", "it000000-p00000-s01", "it000000-p00001-s00"]
    assert [len(images) for images in groups["images"]] == [1, 2, 1]


def test_a_report_holds_its_images(page: Page, run: Run, tmp_path: Path) -> None:
    report.write([run], tmp_path / "report.html")
    page.goto(f"{(tmp_path / 'report.html').as_uri()}#view=answers&id=it000001-p00000-s01")
    page.wait_for_selector("body[data-ready]")
    wait_for_images(page, "#reader figure img", RED, GREEN)
    assert page.inner_text("#reader pre.response") == "see image 2 · 5 tokens no"
    page.evaluate("location.hash = '#view=answers&id=it000001-p00001-s00'")
    wait_for_images(page, "#reader figure img", [320, 213])
    assert "900×600 JPEG" in page.inner_text("#reader figcaption"), "the copy is smaller, and the image is described"


def test_a_report_says_which_images_it_leaves_out(
    page: Page, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "IMAGE_BYTES", len(picture("red")))
    report.write([run], tmp_path / "report.html")
    page.goto(f"{(tmp_path / 'report.html').as_uri()}#view=answers&id=it000001-p00000-s01")
    wait_for_images(page, "#reader figure img", RED)
    assert page.locator("#reader figcaption").all_inner_texts()[1].endswith("left out of this report")


def test_what_is_gone_or_no_picture_is_said(page: Page, run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.store.url.removeprefix("file://").rpartition("/")[0], tmp_path / "runs")
    images = tmp_path / "runs/pictures/images"
    red, green = (hashlib.sha256(data).hexdigest() for data in (picture("red"), picture("green", kind="WEBP")))
    (images / red).unlink()
    (images / green).write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>hacked = 1</script></svg>")
    with served(f"file://{tmp_path}/runs") as url:
        visit(page, f"{url}#run=pictures&id=it000001-p00000-s01&iteration=1&view=answers")
        page.wait_for_selector("#reader figcaption[role=alert]")
        missing, damaged = page.locator("#reader figcaption").all_inner_texts()
        assert f"images/{red} is missing: restore it" in missing and f"images/{green} is damaged" in damaged
        wait_until(page, "document.querySelectorAll('#list .thumbnails img').length === 1")
        page.goto("about:blank")


def ask(url: str, digest: str, size: str = "", run: str = "pictures") -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(f"{url}images/{digest}?run={run}&size={size}") as answer:
            return answer.status, dict(answer.headers.items()), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers.items()), error.read()


def test_images_are_served_as_what_they_are(url: str, run: Run) -> None:
    images = Images(run.store.objects)
    for data, kind in (
        (picture("red"), "image/png"),
        (picture("blue", 900, 600, "JPEG"), "image/jpeg"),
        (picture("green", kind="WEBP"), "image/webp"),
        (picture("black", kind="GIF"), "image/gif"),
    ):
        status, headers, answer = ask(url, images.put(data))
        assert (status, headers["content-type"], answer) == (200, kind, data)
        assert headers["x-content-type-options"] == "nosniff" and "immutable" in headers["cache-control"]
        assert headers["content-security-policy"].startswith("default-src 'none'")
    for kind in ("BMP", "TIFF", "PPM"):
        _, headers, answer = ask(url, images.put(picture("red", kind=kind)))
        assert headers["content-type"] == "image/png" and Image.open(io.BytesIO(answer)).size == (24, 16)
    _, headers, answer = ask(url, images.put(picture("blue", 900, 600, "JPEG")), "thumbnail")
    assert headers["content-type"] == "image/jpeg" and len(answer) < 2000


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>",
        b"<!DOCTYPE html><script>1</script>",
        b"",
        picture("red")[:20],
        picture("red", kind="ICO"),
    ],
    ids=["svg", "html", "empty", "cut", "ico"],
)
def test_nothing_else_is_served(url: str, run: Run, data: bytes) -> None:
    status, headers, answer = ask(url, Images(run.store.objects).put(data))
    assert status == 400 and headers["content-type"] == "application/json" and "cache-control" not in headers
    assert "cannot be shown: it is no PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM" in json.loads(answer)["error"]


def test_only_images_of_the_stores_runs_are_served(url: str, run: Run, tmp_path: Path) -> None:
    digest = Images(run.store.objects).put(picture("red"))
    for wrong in ("..%2Frun.json", "run.json", digest.upper(), digest[:-1]):
        status, _, answer = ask(url, wrong)
        assert status in (400, 404) and picture("red") not in answer
    assert ask(url, digest, run="..%2Fpictures")[0] == 400
    foreign = urllib.request.Request(f"{url}images/{digest}?run=pictures", headers={"Sec-Fetch-Site": "cross-site"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(foreign)


def test_reading_writes_nothing(run: Run, tmp_path: Path) -> None:
    folder = Path(run.store.url.removeprefix("file://"))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
    report.write([open_run(run.store.url)], tmp_path / "report.html")
    assert sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
