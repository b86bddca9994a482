"""Starts SGLang's server with seeds on the CPU, which it otherwise only heeds with the attention of GPUs.

Each process of the server imports this.
"""

from sglang.srt import batch_invariant_ops
from sglang.srt.server_args import (
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)

add_deterministic_attention_backend_choices(["torch_native"])
add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
batch_invariant_ops.enable_batch_invariant_mode = lambda: None  # kernels of GPUs

if __name__ == "__main__":
    from runpy import run_module

    run_module("sglang.launch_server", run_name="__main__")
