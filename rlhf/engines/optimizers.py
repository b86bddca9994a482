"""Optimizers: what each is made with, and the state that it keeps for each parameter.

A checkpoint holds that state by these names, so that every engine can load what another has written. An optimizer is a
class with `type`, `state`, `build` and `set`; `Optimizer` is the union of them. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rlhf.algorithms.base import Options

if TYPE_CHECKING:
    import torch

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Options):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """Tensors for each parameter, of its shape."""

    type: Literal["adamw"] = Field("adamw", description="which optimizer")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="decay rates of the two moments")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")

    @staticmethod
    def build(
        parameters: Iterable[torch.nn.Parameter], *, fused: bool | None = None, foreach: bool | None = None
    ) -> torch.optim.Optimizer:
        """Its options come with each step (`set`).

        Args:
            parameters: those that learn.
            fused: whether one kernel takes a whole step.
            foreach: whether a kernel takes many tensors together. Where both are None, torch chooses.
        """
        from torch.optim import AdamW

        return AdamW(parameters, fused=fused, foreach=foreach)

    def set(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        """For the next step."""
        for group in optimizer.param_groups:
            group["lr"], group["betas"], group["weight_decay"] = lr, self.betas, self.weight_decay


Optimizer = AdamW
