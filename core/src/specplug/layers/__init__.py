"""Building blocks that the target models and the drafters share.

Weights are allocated uninitialised and without gradients: `specplug.models.weights.fill_module` fills them
and refuses to leave one out. Shapes: T tokens, H hidden size.
"""

from specplug.layers.embedding import Embedding
from specplug.layers.linear import FusedLinear, Linear
from specplug.layers.mlp import GatedMLP
from specplug.layers.norm import RMSNorm
from specplug.layers.rotary import Rotary, RotaryScaling, apply_rotary

__all__ = [
    "Embedding",
    "FusedLinear",
    "GatedMLP",
    "Linear",
    "RMSNorm",
    "Rotary",
    "RotaryScaling",
    "apply_rotary",
]
