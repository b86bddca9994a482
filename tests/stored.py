"""Makes the run in tests/data/stored: ``python -m tests.stored``.

A release must read and continue the runs of all earlier ones. From the first release on, the folder is therefore not
made again: if the format changes, `ratchet.infra.store.log.check_version` migrates it. Until then, make it again.

It is a run of PPO with a critic and a reward model, on models of some kilobytes. It has no reward function, since a
committed score holds the digest of the function's code. It was killed after its critic was updated in iteration 1 of 3.
Its config has relative paths: a test copies the folder, and works in the copy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from tests import tiny
from tests.processes import Fault, Processes

STORED = Path(__file__).parent / "data" / "stored"
RUN = "run"


def make(folder: Path) -> None:
    shape = {"hidden": 8, "layers": 1, "intermediate": 8, "heads": 2, "key_value_heads": 1}
    tiny.model_folder(folder / "model", **shape)
    tiny.reward_model_folder(folder / "judge", folder / "model")
    tiny.prompt_file(folder / "prompts.parquet", 8)
    tiny.prompt_file(folder / "held_out.parquet", 4, seed=8)
    config = tiny.config(
        Path("/nowhere"),
        **{
            "run.name": RUN,
            "run.store": "file://.",
            "model.path": "model",
            "data.train": "prompts.parquet",
            "reward.function": None,
            "reward.model": "judge",
            "validation.data": "held_out.parquet",
            "validation.every": 0,
            # another machine replays with other bits
            "checkpoint.on_replay_mismatch": "continue",
        },
    )
    last = Fault("create", '{"kind":"stage","iteration":1,"stage":"update_critic"')
    output = folder / "output"
    output.mkdir()
    killed = Processes(output).train(config, last, setup=partial(os.chdir, folder))
    assert killed.wait() == -9, killed.text
    shutil.rmtree(output)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "stored"
        made.mkdir()
        make(made)
        shutil.rmtree(STORED, ignore_errors=True)
        shutil.copytree(made, STORED)
