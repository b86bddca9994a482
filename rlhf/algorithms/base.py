"""What every algorithm is: a frozen pydantic class, so that a run's config holds the algorithm itself."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Algorithm(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    needs: ClassVar[tuple[str, ...]] = ()
    """Inputs beyond the common ones, by the name of the argument they are passed as."""
