"""The engine's own options, torch-free so that the command line can be built from them.

Every field is ``--<field>`` on the command line and a keyword of `Engine`. Options of algorithms
are not here: they are the fields of the installed packages' `SpecConfig`s.
"""

from typing import Literal

from pydantic import Field, field_validator

from specplug.frozen import Frozen


class EngineOptions(Frozen):
    """Sizes and choices that hold for an engine's life."""

    revision: str | None = Field(None, description="branch, tag or commit of MODEL on the hub")
    device: Literal["auto", "cpu"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="weights and activations; auto: float32 on a CPU"
    )
    attention_backend: Literal["auto", "torch"] = Field("auto", description="attention kernels")
    context_length: int | None = Field(None, ge=2, description="most tokens of a request, prompt and output")
    max_running_requests: int = Field(8, ge=1, le=4096, description="requests decoded at once")
    max_queued_requests: int = Field(1024, ge=1, description="requests that may wait; one more is refused")
    max_total_tokens: int | None = Field(None, ge=2, description="tokens the KV pool holds; unset: from the two above")
    page_size: int = Field(16, ge=1, le=256, description="tokens per KV page")
    chunked_prefill_size: int = Field(512, ge=1, description="most prompt tokens per step")
    tp: int = Field(1, ge=1, description="tensor-parallel size; only 1 in this version")
    trust_remote_code: bool = Field(False, description="run code that a model folder brings")
    speculative_draft_model_path: str | None = Field(None, description="folder or hub id of the draft model")
    speculative_draft_model_revision: str | None = Field(None, description="its branch, tag or commit")
    speculative_acceptance: Literal["auto", "coupled", "rejection"] = Field(
        "auto", description="rule for sampled rows; auto is coupled: the same seed gives the same text for any drafter"
    )
    speculative_on_failure: Literal["plain", "stop"] = Field(
        "plain", description="when the drafter raises: go on without drafts, or end everything with an error"
    )
    speculative_alarm_below: float = Field(
        0.02, ge=0.0, le=1.0, description="warn when fewer first drafts than this share are accepted; 0: never"
    )

    @field_validator("tp")
    @classmethod
    def _one_device(cls, tp: int) -> int:
        if tp > 1:
            raise ValueError("tensor parallel is not in this version: leave --tp out, or give 1")
        return tp

    @property
    def acceptance(self) -> Literal["coupled", "rejection"]:
        """The acceptance rule that `speculative_acceptance` means."""
        return "coupled" if self.speculative_acceptance == "auto" else self.speculative_acceptance
