"""A trainer writes a run to an object store that is away for a while."""

from __future__ import annotations

import os
import threading
import uuid
from urllib.parse import urlparse

import pytest
import s3fs

from ratchet import observe
from ratchet.infra.observe import run as observed_run
from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.verify import verify
from ratchet.infra.store.object_store import ObjectStore
from ratchet.rlhf.metrics import STEP
from tests.faults.proxy import Rule, proxy


def test_the_trainer_does_not_wait_for_a_store_that_is_away(
    s3: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ObjectStore.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(ObjectStore.__init__.__kwdefaults__, "deadline_s", 0.2)
    monkeypatch.setattr(observed_run, "PAUSE_S", 0.1)
    said, tell = threading.Event(), observed_run._tell
    monkeypatch.setattr(observed_run, "_tell", lambda text: (tell(text), said.set()))
    port = urlparse(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    rows = [{"prompt": "2+2?", "response": "4"}]
    with proxy(port, away := Rule("PUT|GET|HEAD", "", "dropped before", times=0)) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        s3fs.S3FileSystem.clear_instance_cache()
        store = f"{s3}/observed-{uuid.uuid4().hex}"
        with observe.start("mine", store, trainer="mine") as run:
            run.step(1).write("generate", rows).close()
            away.times = 10**9
            for number in range(2, 6):
                run.step(number).write("generate", rows).write("score", [{"score": 1.0}]).close()
            assert said.wait(300)  # all steps were handed over meanwhile
            away.times = 0
        stored = open_run(f"{store}/mine")
        assert stored.metrics()[STEP].tolist() == [1, 2, 3, 4, 5] and list(verify(stored.store)) == []
    assert away.struck and "ratchet: mine waits to store step" in capfd.readouterr().err
    monkeypatch.undo()
    s3fs.S3FileSystem.clear_instance_cache()
