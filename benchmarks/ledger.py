"""What a rank holds and sends, for models of 0.5 B to 235 B, on GPUs that are simulated: `python benchmarks/ledger.py`.

The engines of the product run with all layers, on a device that has shapes only (tests/simulated), as one rank of a
group whose other ranks do not exist. So the bytes are counted, and nothing is timed. Beside each stands the estimate by
which a dry run says what fits a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

from tests.contract.on_hollow import BUDGET, GIB, PROMPT, RESPONSE, Ledger, estimate, ledger_of

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "0.5 B, 1 GPU, torch": ("0.5 B", 1, {"engine": "torch"}),
    "7 B, 8 GPUs": ("7 B", 8, {}),
    "32 B, 64 GPUs, tensor_parallel 8": ("32 B", 64, {"tensor_parallel": 8}),
    "70 B, 64 GPUs": ("70 B", 64, {}),
    "70 B, 64 GPUs, tensor_parallel 8": ("70 B", 64, {"tensor_parallel": 8}),
    "235 B (experts), 512 GPUs": ("235 B", 512, {}),
}


def row(title: str, ledger: Ledger, expected: dict[str, float]) -> str:
    update = ledger.phases["update"]
    counted = {"held": ledger.trained} | {name: ledger.phases[name].peak for name in ("log-probs", "update", "weights")}
    sent = (
        sum(size for call, size in update.collectives if call.startswith(name))
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    )
    cells = [f"{size / GIB:.1f} ({expected[name] / GIB:.1f})" for name, size in counted.items()]
    cells += [f"{size / GIB:.1f}" for size in (ledger.pinned, *sent)]
    return f"| {title} | {' | '.join(cells)} | {len(update.collectives)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), choices=LAYOUTS, help="some of the layouts")
    options = parser.parse_args()
    print(f"FSDP, bfloat16, prompts of {PROMPT} and responses of {RESPONSE} tokens, micro-batches of {BUDGET}; GiB:\n")
    columns = ("", "held", "log-probs", "update", "weights", "pinned", "gathered", "reduced", "summed", "calls")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for title in options.only:
        model, count, layout = LAYOUTS[title]
        ledger = ledger_of(model, count // 2, count, None, **layout)
        print(row(title, ledger, estimate(model, count, None, ledger.parameters, **layout)), flush=True)


if __name__ == "__main__":
    from tests.simulated import device

    device.enable()
    main()
