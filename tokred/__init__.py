"""Token reduction for the multimodal transformers that you already have."""

from . import errors
from .adapters import EncoderAdapter, ModelAdapter
from .api import Handle, Support, apply, supported
from .errors import TokredError
from .method import BudgetMethod, Context, Method, ModelShape, Need, Observation, Selection, Stage, Step
from .registry import adapters, encoders, methods, register_adapter, register_method
from .report import Summary, TraceToken
from .vision import (
    DART,
    SCOPE,
    AdaptInfer,
    CoreMatching,
    DivPrune,
    FasterVLM,
    FastV,
    HiPrune,
    PruMerge,
    PyramidDrop,
    Random,
    SparseVLM,
    ToMe,
    Uniform,
    VisionZip,
    VisPruner,
)

__version__ = "0.1.0"

__all__ = [
    "DART",
    "SCOPE",
    "AdaptInfer",
    "BudgetMethod",
    "Context",
    "CoreMatching",
    "DivPrune",
    "EncoderAdapter",
    "FastV",
    "FasterVLM",
    "Handle",
    "HiPrune",
    "Method",
    "ModelAdapter",
    "ModelShape",
    "Need",
    "Observation",
    "PruMerge",
    "PyramidDrop",
    "Random",
    "Selection",
    "SparseVLM",
    "Stage",
    "Step",
    "Summary",
    "Support",
    "ToMe",
    "TokredError",
    "TraceToken",
    "Uniform",
    "VisPruner",
    "VisionZip",
    "adapters",
    "apply",
    "encoders",
    "errors",
    "methods",
    "register_adapter",
    "register_method",
    "supported",
]
