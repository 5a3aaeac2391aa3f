"""Token reduction for the multimodal transformers that you already have."""

from . import errors
from .adapters import ModelAdapter
from .api import Handle, Support, apply, supported
from .errors import TokredError
from .method import BudgetMethod, Context, Method, ModelShape, Need, Observation, Selection, Stage, Step
from .registry import adapters, methods, register_adapter, register_method
from .report import Summary, TraceToken
from .vision import (
    DART,
    AdaptInfer,
    CoreMatching,
    DivPrune,
    FasterVLM,
    FastV,
    HiPrune,
    PyramidDrop,
    Random,
    SparseVLM,
    Uniform,
    VisionZip,
)

__version__ = "0.1.0"

__all__ = [
    "DART",
    "AdaptInfer",
    "BudgetMethod",
    "Context",
    "CoreMatching",
    "DivPrune",
    "FastV",
    "FasterVLM",
    "Handle",
    "HiPrune",
    "Method",
    "ModelAdapter",
    "ModelShape",
    "Need",
    "Observation",
    "PyramidDrop",
    "Random",
    "Selection",
    "SparseVLM",
    "Stage",
    "Step",
    "Summary",
    "Support",
    "TokredError",
    "TraceToken",
    "Uniform",
    "VisionZip",
    "adapters",
    "apply",
    "errors",
    "methods",
    "register_adapter",
    "register_method",
    "supported",
]
