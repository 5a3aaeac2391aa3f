"""Methods for image tokens, one file each."""

from .adaptinfer import AdaptInfer
from .corematching import CoreMatching
from .dart import DART
from .divprune import DivPrune
from .fastervlm import FasterVLM
from .fastv import FastV
from .hiprune import HiPrune
from .pyramiddrop import PyramidDrop
from .random import Random
from .sparsevlm import SparseVLM
from .tome import ToMe
from .uniform import Uniform
from .visionzip import VisionZip

__all__ = [
    "DART",
    "AdaptInfer",
    "CoreMatching",
    "DivPrune",
    "FastV",
    "FasterVLM",
    "HiPrune",
    "PyramidDrop",
    "Random",
    "SparseVLM",
    "ToMe",
    "Uniform",
    "VisionZip",
]
