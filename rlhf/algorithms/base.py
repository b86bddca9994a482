"""What every algorithm is: a frozen pydantic class, so that a run's config holds the algorithm itself."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Parameters that are checked once and never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Algorithm(Options):
    needs: ClassVar[tuple[str, ...]] = ()
    """Inputs beyond the common ones, by the name of the argument they are passed as. They decide which stages an
    iteration runs: ``values`` asks for a critic, ``ref_log_probs`` for a reference, and so on."""
