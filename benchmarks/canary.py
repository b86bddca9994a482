"""Transfers weights many times and counts false alarms of the canary; then counts which faults it finds.

    OMP_NUM_THREADS=1 python benchmarks/canary.py --engine hf --syncs 1000
    OMP_NUM_THREADS=1 python benchmarks/canary.py --engine vllm --dtype bfloat16 --lr 1e-6

A trainer of a tiny Llama takes a step of Adam before each transfer, and the check is the product's. The faults are
those of tests/contract/test_canary.py, each followed by a good transfer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests.contract.test_canary import FAULTS, Checked, vllm
from tests.contract.test_rollout_engines import hf_rollout
from tests.tiny import model_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--syncs", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = model_folder(Path(parent) / "model", hidden=128, intermediate=128, key_value_heads=4)
        model: Any = ModelConfig(path=str(folder), dtype=options.dtype)
        trainer = TorchEngine(load_actor(model), "policy", dtype=options.dtype)
        engine = (hf_rollout if options.engine == "hf" else vllm)(folder, dtype=options.dtype)
        checked = Checked(trainer, engine, options.dtype, lr=options.lr)
        began, alarms, largest = time.perf_counter(), 0, 0.0
        for _ in range(options.syncs):
            finding = checked.transfer()
            alarms += finding.problem is not None
            largest = max(largest, finding.difference / finding.tolerance)
        seconds = (time.perf_counter() - began) / max(1, options.syncs)
        print(f"{options.syncs} transfers of {seconds:.2f} s: {alarms} alarms")
        print(f"the largest difference is {largest:.2f} of the tolerance")
        missed = []
        for name, fault in FAULTS.items():
            finding = checked.transfer(fault)
            if finding.problem is None:
                missed.append(f"{name} ({finding.difference:.1e} of {finding.tolerance:.1e})")
            checked.transfer()
        print(f"{len(FAULTS) - len(missed)} of {len(FAULTS)} faults found; missed: {', '.join(missed) or 'none'}")
        engine.close()


if __name__ == "__main__":
    main()
