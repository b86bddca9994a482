"""Optimizers: their options, and the state that they keep for each parameter.

A checkpoint stores this state under the names in `state`, so that every engine can load the checkpoints of the others.
An optimizer is a class with `type`, `state`, `build` and `set`; `Optimizer` is the union of them. Importing this module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.rlhf.algorithms.base import Options

if TYPE_CHECKING:
    import torch

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Options):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """Names of the state tensors of each parameter; they have the parameter's shape."""

    type: Literal["adamw"] = Field("adamw", description="which optimizer")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="decay rates of the two moments (TRL)")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay (TRL, OpenRLHF; verl has 0.01)")

    @staticmethod
    def build(*groups: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Builds the torch optimizer, without state; its options are set before each step (`set`).

        It updates many tensors in one kernel, which does not mix `groups`.
        """
        from torch.optim import AdamW

        return AdamW([{"params": list(group)} for group in groups], fused=True)

    def set(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        """Sets the options of the next step."""
        for group in optimizer.param_groups:
            group["lr"], group["betas"], group["weight_decay"] = lr, self.betas, self.weight_decay


Optimizer = AdamW
