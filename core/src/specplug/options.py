"""The engine's own options, torch-free so that the command line can be built from them.

Every field is ``--<field>`` on the command line and a keyword of `Engine`. Options of algorithms
are not here: they are the fields of the installed packages' `SpecConfig`s.
"""

import re
from typing import Literal

from pydantic import Field, field_validator

from specplug.frozen import Frozen

_SYNTHETIC = re.compile(r"synthetic:([0-9]{1,6}(?:\.[0-9]{1,6})?)")
_ACCEPTANCE = "auto, coupled, rejection, or synthetic:LEN with LEN at least 1, such as synthetic:2.5"
LOSSY = (
    "--speculative-acceptance {0} is lossy: drafts are accepted by a coin, not by what they say, so the text means "
    "nothing; it is for measuring cost"
)
"""What is said wherever synthetic acceptance is in force; the option's value goes in."""


class EngineOptions(Frozen):
    """Sizes and choices that hold for an engine's life."""

    revision: str | None = Field(None, description="branch, tag or commit of MODEL on the hub")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the model runs; auto: a CUDA device if there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="weights and activations; auto: float32 on a CPU, half precision on CUDA"
    )
    attention_backend: Literal["auto", "torch", "flashinfer", "paged"] = Field(
        "auto", description="attention kernels; auto: torch on a CPU, on CUDA flashinfer where installed, else paged"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights from config.json alone, to measure cost"
    )
    context_length: int | None = Field(None, ge=2, description="most tokens of a request, prompt and output")
    max_running_requests: int = Field(8, ge=1, le=4096, description="requests decoded at once")
    max_queued_requests: int = Field(1024, ge=1, description="requests that may wait; one more is refused")
    max_total_tokens: int | None = Field(None, ge=2, description="tokens the KV pool holds; unset: what fits")
    mem_fraction_static: float = Field(
        0.9,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="share of a CUDA device's memory for weights, KV, drafter and graphs",
    )
    disable_cuda_graph: bool = Field(False, description="launch every kernel by itself, which is slower")
    max_cuda_graphs: int = Field(64, ge=1, description="most batch shapes captured as CUDA graphs at start")
    page_size: int = Field(16, ge=1, le=256, description="tokens per KV page")
    chunked_prefill_size: int = Field(512, ge=1, description="most prompt tokens per step")
    tp: int = Field(1, ge=1, description="tensor-parallel size; only 1 in this version")
    trust_remote_code: bool = Field(False, description="run code that a model folder brings")
    speculative_draft_model_path: str | None = Field(None, description="folder or hub id of the draft model")
    speculative_draft_model_revision: str | None = Field(None, description="its branch, tag or commit")
    speculative_draft_load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights for the draft model, no file read"
    )
    speculative_acceptance: str = Field(
        "auto",
        description="rule for sampled rows: coupled (auto; the same seed gives the same text for any drafter), "
        "rejection, or synthetic:LEN, which is lossy: LEN tokens per verify on average, to measure cost",
    )
    speculative_adaptive: bool = Field(False, description="choose how far to draft while running, 0 included")
    speculative_adaptive_policy: Literal["ema", "cost"] | None = Field(
        None,
        description="ema (default): by accepted lengths and batch size; cost: by measured cost and acceptance, "
        "so that drafting is never much slower than none",
    )
    speculative_adaptive_config: str | None = Field(
        None, description="JSON file of candidates per batch size, as SGLang's, or what tune wrote"
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

    @field_validator("speculative_acceptance")
    @classmethod
    def _known_rule(cls, word: str) -> str:
        synthetic = _SYNTHETIC.fullmatch(word)
        if word not in ("auto", "coupled", "rejection") and not (synthetic and float(synthetic[1]) >= 1):
            raise ValueError(f"must be one of {_ACCEPTANCE}")
        return word

    @property
    def acceptance(self) -> Literal["coupled", "rejection", "synthetic"]:
        """The acceptance rule that `speculative_acceptance` means."""
        if self.speculative_acceptance == "rejection":
            return "rejection"
        return "synthetic" if self.acceptance_mean else "coupled"

    @property
    def acceptance_mean(self) -> float:
        """Mean tokens that a verify emits under ``synthetic``, the bonus counted; 0.0 under any other rule."""
        synthetic = _SYNTHETIC.fullmatch(self.speculative_acceptance)
        return float(synthetic[1]) if synthetic else 0.0

    @property
    def lossy(self) -> str:
        """The sentence that says why what is generated is not the model's text; empty where it is."""
        return LOSSY.format(self.speculative_acceptance) if self.acceptance == "synthetic" else ""
