"""Building blocks that the target models and the drafters share.

Weights are allocated uninitialised and without gradients: `specplug.models.weights.fill_module` fills them
and refuses to leave one out. Shapes: T tokens, H hidden size. On CUDA in half precision they use fused
kernels where these can be had (`specplug.layers.fused`); nothing here waits for the device.
"""

from specplug.layers.block import DecoderLayer, SelfAttention
from specplug.layers.embedding import Embedding
from specplug.layers.linear import FusedLinear, Linear
from specplug.layers.mlp import GatedMLP, silu_and_mul
from specplug.layers.norm import RMSNorm
from specplug.layers.rotary import Angles, Rotary, RotaryScaling, apply_rotary
from specplug.layers.vocab import draft_vocabulary

__all__ = [
    "Angles",
    "DecoderLayer",
    "Embedding",
    "FusedLinear",
    "GatedMLP",
    "Linear",
    "RMSNorm",
    "Rotary",
    "RotaryScaling",
    "SelfAttention",
    "apply_rotary",
    "draft_vocabulary",
    "silu_and_mul",
]
