"""SGLang's server, which seeds requests only with attention that it lists: here with PyTorch's, too."""

from sglang.srt.server_args import (
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)

add_deterministic_attention_backend_choices(["torch_native"])
add_radix_supported_deterministic_attention_backend_choices(["torch_native"])

if __name__ == "__main__":
    from runpy import run_module

    run_module("sglang.launch_server", run_name="__main__")
