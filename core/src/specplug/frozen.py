"""The base of everything that is declared. Torch-free."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of every declaration: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
