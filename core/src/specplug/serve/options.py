"""The server's own options. Torch-free; every field is ``--<field>`` of ``specplug serve``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from specplug.frozen import Frozen

API_KEY_VARIABLE = "SPECPLUG_API_KEY"
"""Environment variable that stands for ``--api-key``, which other users of the machine could read in a process list."""


class ServeOptions(Frozen):
    """What holds for a server's life, besides the engine's options."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0: all, with --api-key")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: a free one, which is printed")
    api_key: str | None = Field(None, description="key that requests must bring; SPECPLUG_API_KEY does the same")
    served_model_name: str | None = Field(None, description="the model's name in the API; unset: MODEL's last part")
    request_timeout: float = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that one request may take, its time in the queue included",
    )
    drain_timeout: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="seconds that running requests get when the server is told to end"
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="what requests get for temperature, top_k, top_p, min_p and repetition_penalty where they leave "
        "them out: what MODEL's generation_config.json says, or OpenAI's values",
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="largest body of a request")

    @field_validator("api_key", "served_model_name")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must not be blank: give a word, or leave the option out")
        return value
