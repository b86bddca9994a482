"""What a rank holds and sends, for models of 0.5 B to 235 B, on GPUs that are simulated: `python benchmarks/ledger.py`.

The engines of the product run with all layers, on a device that has shapes only (tests/simulated), as one rank of a
group whose other ranks do not exist. So the bytes are counted, and nothing is timed.
"""

from __future__ import annotations

import argparse

from tests.contract.on_hollow import BUDGET, GIB, PROMPT, RESPONSE, Ledger, ledger_of

LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {
    "7 B, 8 GPUs": ("7 B", 8, {}),
    "32 B, 64 GPUs, tensor_parallel 8": ("32 B", 64, {"tensor_parallel": 8}),
    "70 B, 64 GPUs": ("70 B", 64, {}),
    "70 B, 64 GPUs, tensor_parallel 8": ("70 B", 64, {"tensor_parallel": 8}),
    "235 B (experts), 512 GPUs": ("235 B", 512, {}),
}


def row(title: str, ledger: Ledger) -> str:
    update = ledger.phases["update"]
    sent = {
        name: sum(size for call, size in update.collectives if call.startswith(name))
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    }
    bytes_of = (
        *(ledger.trained, ledger.phases["log-probs"].peak, update.peak, ledger.phases["weights"].peak, ledger.pinned),
        *sent.values(),
    )
    return f"| {title} | {' | '.join(f'{size / GIB:.1f}' for size in bytes_of)} | {len(update.collectives)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), choices=LAYOUTS, help="some of the layouts")
    options = parser.parse_args()
    print(f"FSDP, bfloat16, prompts of {PROMPT} and responses of {RESPONSE} tokens, micro-batches of {BUDGET}; GiB:\n")
    columns = ("", "held", "log-probs", "update", "weights", "pinned", "gathered", "reduced", "summed", "calls")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for title in options.only:
        model, count, layout = LAYOUTS[title]
        print(row(title, ledger_of(model, count // 2, count, None, **layout)), flush=True)


if __name__ == "__main__":
    from tests.simulated import device

    device.enable()
    main()
