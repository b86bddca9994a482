"""`Tensor` for hints that are inspected at run time, in modules that do not import torch, which takes long."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
else:

    class _IsTensor(type):
        def __instancecheck__(cls, value: object) -> bool:
            torch = sys.modules.get("torch")
            return torch is not None and isinstance(value, torch.Tensor)

    class Tensor(metaclass=_IsTensor):
        """Any `torch.Tensor`."""


__all__ = ["Tensor"]
