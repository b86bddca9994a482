"""Base classes of the algorithms: frozen pydantic models, so that a run's config holds the algorithm itself."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Immutable parameters, validated once."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Algorithm(Options):
    """An algorithm whose fields are its configuration."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments that this algorithm takes in addition to the common ones.

    They decide which stages an iteration runs: ``values`` requires a critic, ``ref_log_probs`` a reference, and so on.
    """
