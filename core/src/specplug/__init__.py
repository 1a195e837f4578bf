"""specplug: a small decoding runtime into which draft algorithms plug.

Importing this package does not import torch; the names that need it load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from specplug.combine import combined_plan
from specplug.errors import DrafterFailedError, RefusedError, UserError
from specplug.hookspecs import hookimpl
from specplug.models.family import DecoderConfig, Rope, decoder_sizes
from specplug.models.shape import last_draft_position, model_shape
from specplug.names import fold
from specplug.sampling import SamplingParams
from specplug.spec import (
    API,
    AlgorithmSpec,
    Capabilities,
    Checkpoint,
    Claim,
    Defaults,
    DraftPlan,
    Facts,
    KVLayers,
    Limits,
    ModelShape,
    Observer,
    Parallel,
    Problem,
    Refusal,
    RunInfo,
    Setting,
    SpecConfig,
    StepStats,
    TapRequest,
    TensorInfo,
)

if TYPE_CHECKING:
    from specplug.drafter import (
        Arena,
        CombinedDrafter,
        DraftContext,
        Drafter,
        GraphRecorder,
        HostRow,
        HostView,
        KVView,
        RequestView,
        SamplingView,
        StepView,
        TargetView,
    )
    from specplug.models.draft import DraftModel, KVPart, KVStep, Reading
    from specplug.models.draft_block import DraftBlock, draft_blocks
    from specplug.proposal import HostProposal, Proposal
    from specplug.runtime.engine import Engine
    from specplug.runtime.request import Delta, Result

_HEAVY = {
    **dict.fromkeys(
        (
            "Arena",
            "CombinedDrafter",
            "DraftContext",
            "Drafter",
            "GraphRecorder",
            "HostRow",
            "HostView",
            "KVView",
            "RequestView",
            "SamplingView",
            "StepView",
            "TargetView",
        ),
        "specplug.drafter",
    ),
    **dict.fromkeys(("DraftModel", "KVPart", "KVStep", "Reading"), "specplug.models.draft"),
    **dict.fromkeys(("DraftBlock", "draft_blocks"), "specplug.models.draft_block"),
    **dict.fromkeys(("HostProposal", "Proposal"), "specplug.proposal"),
    "Engine": "specplug.runtime.engine",
    **dict.fromkeys(("Delta", "Result"), "specplug.runtime.request"),
}

__all__ = [
    "API",
    "AlgorithmSpec",
    "Arena",
    "Capabilities",
    "Checkpoint",
    "Claim",
    "CombinedDrafter",
    "DecoderConfig",
    "Defaults",
    "Delta",
    "DraftBlock",
    "DraftContext",
    "DraftModel",
    "DraftPlan",
    "Drafter",
    "DrafterFailedError",
    "Engine",
    "Facts",
    "GraphRecorder",
    "HostProposal",
    "HostRow",
    "HostView",
    "KVLayers",
    "KVPart",
    "KVStep",
    "KVView",
    "Limits",
    "ModelShape",
    "Observer",
    "Parallel",
    "Problem",
    "Proposal",
    "Reading",
    "Refusal",
    "RefusedError",
    "RequestView",
    "Result",
    "Rope",
    "RunInfo",
    "SamplingParams",
    "SamplingView",
    "Setting",
    "SpecConfig",
    "StepStats",
    "StepView",
    "TapRequest",
    "TargetView",
    "TensorInfo",
    "UserError",
    "combined_plan",
    "decoder_sizes",
    "draft_blocks",
    "fold",
    "hookimpl",
    "last_draft_position",
    "model_shape",
]


def __getattr__(name: str) -> Any:
    if name in _HEAVY:
        return getattr(importlib.import_module(_HEAVY[name]), name)
    raise AttributeError(f"module 'specplug' has no attribute {name!r}")
