"""The report of runs, opened in a real Chromium: what it shows, and that nothing in it is ever more than text."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from websockets.sync.client import connect

from flows import report
from flows.metrics import CATALOGUE
from flows.train import train
from infra.runs import Run, open_run
from rlhf.errors import UserError
from tasks.plan import fork_run
from tests import tiny
from tests.integration.test_cli import Ratchet
from tests.ports import free_port

HOSTILE = '</script><img src=x onerror="hacked=1"><script>hacked=1</script>'
QT_BROWSER = """
import sys
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication
app = QApplication(sys.argv)
view = QWebEngineView()
view.resize(1280, 900)
view.show()
app.exec()
"""


class Chromium:
    """A headless Chromium in a process of its own, driven over the DevTools protocol.

    It is Qt WebEngine, since that is a Chromium that pip brings (PySide6, a dev dependency) and that needs no display
    (Qt's `offscreen` platform). Where it does not start, for want of system libraries such as libnss3, a Chromium or
    Chrome on the PATH serves. There is no third way: without a browser these tests fail and do not pass unseen.
    """

    def __init__(self, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.calls = 0
        installed = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
        flags = ("--headless=new", "--no-sandbox", "--remote-allow-origins=*", f"--user-data-dir={folder}")
        commands = [[sys.executable, "-c", QT_BROWSER], *([name, *flags] for name in installed if name)]
        self.log = folder / "browser.log"
        urls = (self._start(command) for command in commands)
        url = next((url for url in urls if url is not None), None)
        assert url is not None, f"no Chromium starts here (see this class): {self.log.read_text()[-2000:]}"
        self.socket = connect(url, max_size=None, ping_interval=None)  # a busy machine does not answer pings in time
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _start(self, command: list[str]) -> str | None:
        """Start a browser; the URL by which its page is driven, or None if it does not come up."""
        port = free_port()
        environment = os.environ | {
            "QT_QPA_PLATFORM": "offscreen",
            "QTWEBENGINE_DISABLE_SANDBOX": "1",  # it does not start for root otherwise; the page is our own
            "QTWEBENGINE_REMOTE_DEBUGGING": f"127.0.0.1:{port}",
            "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu",
        }
        if command[0] != sys.executable:
            command = [*command, f"--remote-debugging-port={port}"]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                    pages = [page for page in json.load(answer) if page["type"] == "page"]
            except OSError:
                pages = []
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
            time.sleep(0.1)
        self._end()
        return None

    def close(self) -> None:
        self.socket.close()
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.calls += 1
        self.socket.send(json.dumps({"id": self.calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv(timeout=300))
            if message.get("id") == self.calls:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    def open(self, path: Path) -> None:
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.wait("document.readyState === 'complete'")

    def __call__(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + 300
        while not self(condition):
            assert time.monotonic() < deadline, f"this did not come about: {condition}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """With the mouse, where the element is to be seen."""
        quoted = json.dumps(selector)
        self(f"document.querySelector({quoted}).scrollIntoView({{block: 'center'}})")
        box = self(f"document.querySelector({quoted}).getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def enter(self, selector: str, text: str) -> None:
        """Replace what a field holds, by the keyboard."""
        self(f"document.querySelector({json.dumps(selector)}).select()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key="Delete", windowsVirtualKeyCode=46)

    def select(self, selector: str, value: str) -> None:
        element = f"document.querySelector({json.dumps(selector)})"
        self(f"{element}.value = {json.dumps(value)}")
        for event in ("input", "change"):
            self(f"{element}.dispatchEvent(new Event('{event}', {{bubbles: true}}))")

    def look(self, *, width: int, height: int, scheme: str) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def trouble(self) -> list[dict[str, Any]]:
        """Requests for anything but the page itself, and whatever the console calls an error."""
        self("new Promise(done => setTimeout(done, 100))")
        return [event for event in self.events if _is_trouble(event)]


def _is_trouble(event: dict[str, Any]) -> bool:
    match event["method"]:
        case "Network.requestWillBeSent":
            return event["params"]["type"] != "Document" and not event["params"]["request"]["url"].startswith("data:")
        case "Log.entryAdded":
            return event["params"]["entry"]["level"] == "error"
        case "Runtime.consoleAPICalled":
            return event["params"]["type"] in ("error", "assert")
        case method:
            return bool(method == "Runtime.exceptionThrown")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Chromium) -> Chromium:
    chromium.look(width=1280, height=900, scheme="light")
    return chromium


@pytest.fixture(scope="module")
def hostile_workspace(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose very tokens are markup, so that what it writes is; so are the prompts and what they ask for."""
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(workspace, folder, dirs_exist_ok=True)
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        f"{HOSTILE}{token}\n" if token.isupper() and len(token) == 1 else token: number
        for token, number in vocabulary.items()
    }
    path.write_text(json.dumps(tokenizer))
    prompts = pd.read_parquet(folder / "prompts.parquet")
    prompts["prompt"] = [[{"role": "user", "content": f"{HOSTILE} {one[0]['content']}"}] for one in prompts["prompt"]]
    prompts["reward_model"] = [one | {"ground_truth": HOSTILE} for one in prompts["reward_model"]]
    prompts.to_parquet(folder / "prompts.parquet")
    return folder


@pytest.fixture(scope="module")
def store(
    workspace: Path, hostile_workspace: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: str
) -> Path:
    """A folder with runs: `ppo`; `grpo` without reference and validation; forks that are open; one that is hostile."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {"run__store": f"file://{folder}", "reward__function": "tests.rewards:letters"}
    validation = {"data": str(workspace / "held_out.parquet"), "every": 2}
    ppo = tiny.config(workspace, run__name="ppo", validation=validation, **changes)
    train(ppo)
    grpo = {"algorithm__advantage": "grpo", "algorithm__kl__in_reward": None, "actor__lr": 0.002}
    train(tiny.config(workspace, run__name="grpo", **changes | grpo))
    train(tiny.config(hostile_workspace, run__name="hostile", data__max_prompt_tokens=400, **changes))
    for name, iteration in (("open", 2), ("new", 0)):
        fork_run(open_run(f"file://{folder}/ppo"), ppo.with_values({"run.name": name}), iteration, "score")
    return folder


def plain(text: str) -> str:
    """Without the special tokens, as trajectories have responses."""
    for token in ("<eos>", "<unk>", "<pad>"):
        text = text.replace(token, "")
    return text


def runs(store: Path, *names: str) -> list[Run]:
    return [open_run(f"file://{store}/{name}") for name in names]


def test_runs_are_overlaid(browser: Chromium, store: Path, tmp_path: Path) -> None:
    both = runs(store, "ppo", "grpo")
    report.write(both, tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    charts = {
        chart["title"]: chart["lines"]
        for chart in browser(
            "[...document.querySelectorAll('.chart')].map(chart => ({title: chart.previousSibling.textContent,"
            " lines: chart.data.map(line => ({name: line.name, y: [...line.y]}))}))"
        )
    }
    metrics = [run.metrics() for run in both]
    reported = {name for frame in metrics for name in frame}
    elsewhere = {"timing_s/update_weights", "perf/weight_sync_bytes"}  # here the rollout shares the actor's tensors
    elsewhere |= {"perf/mfu/actor", "perf/max_memory_allocated_gb", "num_turns/mean", "actor/kl_loss"}
    assert {display.name for display in CATALOGUE} - elsewhere <= reported, "stages report all that is shown"
    for key, title in report.CURVES.items():
        expected = [
            {"name": name, "y": pytest.approx(list(frame[key]), rel=1e-5)}
            for name, frame in zip(("ppo", "grpo"), metrics, strict=True)
            if key in frame
        ]
        lines = [{**line, "y": line["y"][:3]} for line in charts.get(title, [])]  # then comes the last validation
        assert lines == expected, key
    assert [line["name"] for line in charts["critic/score/mean: score, mean"]] == ["ppo", "grpo"]
    assert [line["name"] for line in charts["critic/vf_loss: value loss"]] == ["ppo"]
    rates = open_run(f"file://{store}/ppo").validation().groupby("iteration")["score"].mean()
    (validated,) = charts["validation: countdown/reward/mean@1"]
    assert validated["y"] == [pytest.approx(rates[at], rel=1e-3) if at in rates else None for at in range(4)]
    assert [line["name"] for line in charts["grpo: seconds by stage"]][:3] == ["gen", "reward", "old_log_prob"]
    drawn = browser("[...document.querySelectorAll('path.js-line')].filter(path => path.getTotalLength() > 20).length")
    assert drawn >= 2 * 8
    assert browser("document.querySelectorAll('#seconds .bars path').length") > 2 * 3 * 5
    keys = browser(
        "[...document.querySelectorAll('#config tr')].map(row => [...row.cells].map(one => one.textContent))"
    )
    assert ["actor.lr", "0.001", "0.002"] in keys
    assert "train.iterations" not in [key for key, *_ in keys]

    browser.click("#legend button")
    assert browser("document.querySelector('.chart').data.map(line => line.name)") == ["grpo"]
    assert browser.trouble() == []


def test_trajectories_are_filtered_and_sorted(browser: Chromium, store: Path, tmp_path: Path) -> None:
    (run,) = runs(store, "ppo")
    report.write([run], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    frame = run.trajectories()
    shown = "[...document.querySelectorAll('#list .clip')].map(row => row.textContent)"
    assert len(browser(shown)) == len(frame) == 24
    best = frame.sort_values(["score", "iteration", "trajectory_id"], ascending=[False, False, True])
    assert browser(shown) == list(best["response"])

    browser.select("#iteration", "1")
    assert browser(shown) == list(best[best["iteration"] == 1]["response"])
    middle = float(np.median(frame["score"])) + 1e-3
    browser.enter("#low", str(middle))
    assert browser(shown) == list(best[(best["iteration"] == 1) & (best["score"] >= middle)]["response"])
    browser.enter("#low", "")
    browser.enter("#high", str(middle))
    browser.select("#iteration", "")
    browser.select("#sort", "+score")
    expected = frame.sort_values(["score", "iteration", "trajectory_id"], ascending=[True, False, True])
    assert browser(shown) == list(expected[expected["score"] <= middle]["response"])
    browser.enter("#high", "")
    wanted = next(text[at : at + 2] for text in frame["response"] for at in range(6) if text[at : at + 2].isupper())
    browser.enter("#text", wanted.lower())
    assert sorted(browser(shown)) == sorted(
        row.response
        for row in frame.itertuples()
        if any(wanted.lower() in text.lower() for text in (row.response, row.prompt, row.ground_truth))
    )
    assert browser.trouble() == []


def test_tokens_are_coloured_by_what_is_chosen(browser: Chromium, store: Path, tmp_path: Path) -> None:
    report.write(runs(store, "ppo", "grpo"), tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    frame = open_run(f"file://{store}/ppo").trajectories().set_index("trajectory_id")
    browser.click("#list button:nth-child(3)")
    assert browser("document.querySelector('#list button:nth-child(3)').getAttribute('aria-pressed')") == "true"
    row = frame.loc[browser("document.querySelector('#reader h3').textContent").split()[0]]
    assert browser("document.getElementById('prompt').textContent") == row["prompt"]
    facts = browser("document.querySelector('#reader dl').textContent")
    assert row["ground_truth"] in facts and f"{row['score']:.4g}" in facts and row["finish_reason"] in facts

    names = browser("[...document.getElementById('quantity').options].map(one => one.value)")
    quantities = {
        "advantage": row["advantages"],
        "log-prob less the reference's": row["old_log_probs"] - row["ref_log_probs"],
        "log-prob less the rollout's": row["old_log_probs"] - row["rollout_log_probs"],
        "entropy": row["entropy"],
    }
    assert names == list(quantities)
    seen = []
    for name, values in quantities.items():
        browser.select("#quantity", name)
        tokens = browser(
            "[...document.querySelectorAll('.token')].map(token =>"
            " [token.textContent, getComputedStyle(token).backgroundColor, token.title])"
        )
        assert len(tokens) == len(row["response_ids"])
        assert plain("".join(text for text, *_ in tokens)) == row["response"]
        assert [float(title.rsplit(" ", 1)[1]) for *_, title in tokens] == pytest.approx(list(values), rel=1e-3)
        for value, (_, color, _) in zip(values, tokens, strict=True):
            assert color.startswith("rgba(") or color.startswith("rgb(")
            if name == "advantage" and abs(value) > 1e-2:
                assert color.startswith("rgba(50, 120, 220" if value > 0 else "rgba(230, 120, 40"), value
        seen.append([color for _, color, _ in tokens])
    assert len({tuple(colors) for colors in seen}) == 4
    browser.click(".token:nth-child(2)")
    told = browser("document.getElementById('told').textContent")
    assert told.startswith("token 1 ") and f"entropy {row['entropy'][1]:.4g}" in told

    browser.select("#run", "1")
    assert "log-prob less the reference's" not in browser(
        "[...document.getElementById('quantity').options].map(one => one.value)"
    )
    assert browser.trouble() == []


def test_what_a_model_writes_stays_text(browser: Chromium, store: Path, tmp_path: Path) -> None:
    (run,) = runs(store, "hostile")
    frame = run.trajectories().set_index("trajectory_id")
    assert frame["response"].str.contains("<script>", regex=False).sum() > 5
    report.write([run], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    for number in range(1, len(frame) + 1):
        browser.click(f"#list button:nth-child({number})")
        row = frame.loc[browser("document.querySelector('#reader h3').textContent").split()[0]]
        assert plain(browser("document.getElementById('response').textContent")) == row["response"]
        assert browser("document.getElementById('prompt').textContent") == row["prompt"]
    assert HOSTILE in browser("document.querySelector('#reader dl').textContent")
    browser.click(".token")
    assert browser("document.querySelectorAll('img').length") == 0
    assert browser("document.querySelectorAll('script').length") == 3
    assert browser("typeof hacked") == "undefined"
    assert browser.trouble() == []


def test_a_run_that_goes_on(browser: Chromium, store: Path, tmp_path: Path) -> None:
    """Its closed iterations are shown; where there is none, so is what it will be."""
    path = tmp_path / "report.html"
    report.write(runs(store, "open"), path)
    browser.open(path)
    said = browser("document.getElementById('summary').textContent")
    assert "2 of 3 iterations closed" in said and "forked from" in said and "2:score" in said
    assert browser("[...document.querySelector('.chart').data[0].x]") == [0, 1, 2]
    assert browser("document.querySelector('.chart').data[0].y[2]") is None, "only the validation is committed"
    assert browser("new Set(chosenRun().trajectories.map(one => one.iteration)).size") == 2
    report.write(runs(store, "new"), path)
    browser.open(path)
    assert "no iteration is closed yet" in browser("document.getElementById('count').textContent")
    assert browser("document.querySelectorAll('.token').length") == 0
    assert browser.trouble() == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_needs_no_model(
    browser: Chromium, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise UserError("the model is on another machine")

    monkeypatch.setattr(report, "load_tokenizer", missing)
    (run,) = runs(store, "ppo")
    report.write([run], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert browser("document.getElementById('response').textContent") in set(run.trajectories()["response"])
    assert browser("document.querySelectorAll('.token').length") == 0
    assert browser.trouble() == []


def test_phones_and_the_dark(browser: Chromium, store: Path, tmp_path: Path) -> None:
    report.write(runs(store, "ppo", "grpo"), tmp_path / "report.html")
    grounds = []
    for width, height, scheme in ((1280, 900, "light"), (390, 844, "dark")):
        browser.look(width=width, height=height, scheme=scheme)
        browser.open(tmp_path / "report.html")
        assert browser("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        assert browser("Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth))") <= width
        grounds.append(browser("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 246, 244)", "rgb(19, 20, 23)"]


def test_a_sample_is_bounded_and_holds_best_and_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "trajectory_id": [f"it{number // 100}-{number}" for number in range(300)],
            "iteration": np.arange(300) // 100,
            "score": generator.normal(size=300),
            "response_ids": [np.zeros(10)] * 300,
        }
    )
    sample = report._sample(frame)
    assert len(sample) == report.SAMPLED_TRAJECTORIES
    pd.testing.assert_frame_equal(sample, report._sample(frame.sample(frac=1, random_state=1)), check_like=True)
    monkeypatch.setattr(report, "SAMPLED_TOKENS", 120)
    sample = report._sample(frame)
    assert list(sample.groupby("iteration").size()) == [4, 4, 4]
    for edge in ("min", "max"):
        assert list(sample.groupby("iteration")["score"].agg(edge)) == list(
            frame.groupby("iteration")["score"].agg(edge)
        )


def test_tokens_that_are_parts_of_characters() -> None:
    """Every byte is a token here: a character stands with the last of its bytes, and nothing is lost."""

    def decode(ids: tuple[int, ...]) -> str:
        return bytes(ids).decode(errors="replace")

    text = "a é 日本 🙂\n"
    texts = report.token_texts(tuple(text.encode()), decode)
    assert texts == ["a", " ", "", "é", " ", "", "", "日", "", "", "本", " ", "", "", "", "🙂", "\n"]
    cut = report.token_texts(tuple("é🙂".encode()[:-1]), decode)
    assert "".join(cut) == "é\ufffd"


def test_mistakes(store: Path, tmp_path: Path) -> None:
    both = runs(store, "ppo", "ppo")
    with pytest.raises(UserError, match="is named twice"):
        report.write(both, tmp_path / "report.html")
    with pytest.raises(UserError, match="cannot write there: No such file or directory"):
        report.write(both[:1], tmp_path / "nowhere" / "report.html")


def test_the_command(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ratchet = Ratchet(monkeypatch, capfd)
    path = tmp_path / "report.html"
    code, out, err = ratchet("report", "ppo", "grpo", "--store", f"file://{store}", "-o", path)
    assert code == 0, err
    assert str(path) in out.replace("\n", "")
    assert "<title>ppo, grpo</title>" in path.read_text()
    assert ratchet("report", "nowhere", "--store", f"file://{store}", "-o", path)[0] == 2
