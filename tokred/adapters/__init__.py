"""Model families: one data record each."""

from .base import Media, ModelAdapter, grid_cells
from .encoders import ENCODERS, EncoderAdapter
from .llava import LLAVA
from .llava_next import LLAVA_NEXT
from .qwen_vl import QWEN2_5_VL, QWEN2_VL

BUILT_IN = (LLAVA, LLAVA_NEXT, QWEN2_VL, QWEN2_5_VL)

__all__ = [
    "BUILT_IN",
    "ENCODERS",
    "LLAVA",
    "LLAVA_NEXT",
    "QWEN2_5_VL",
    "QWEN2_VL",
    "EncoderAdapter",
    "Media",
    "ModelAdapter",
    "grid_cells",
]
