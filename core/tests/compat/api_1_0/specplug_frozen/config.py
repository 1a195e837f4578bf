"""Options. Torch-free."""

from pydantic import Field

from specplug import SpecConfig


class HostConfig(SpecConfig):
    """Options of frozen-host."""

    frozen_match: int = Field(1, ge=1, le=8, description="tokens that have to be the same")


class DeviceConfig(SpecConfig):
    """Options of frozen-device."""

    num_steps: int = Field(3, ge=1, le=16, description="drafts per step")
    draft_sampling: bool = Field(False, description="draw drafts at the request's temperature")
