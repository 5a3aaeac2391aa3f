"""Methods for image tokens, one file each."""

from .adaptinfer import AdaptInfer
from .corematching import CoreMatching
from .dart import DART
from .divprune import DivPrune
from .fastervlm import FasterVLM
from .fastv import FastV
from .hiprune import HiPrune
from .prumerge import PruMerge
from .pyramiddrop import PyramidDrop
from .random import Random
from .scope import SCOPE
from .sparsevlm import SparseVLM
from .tome import ToMe
from .uniform import Uniform
from .visionzip import VisionZip
from .vispruner import VisPruner

__all__ = [
    "DART",
    "SCOPE",
    "AdaptInfer",
    "CoreMatching",
    "DivPrune",
    "FastV",
    "FasterVLM",
    "HiPrune",
    "PruMerge",
    "PyramidDrop",
    "Random",
    "SparseVLM",
    "ToMe",
    "Uniform",
    "VisPruner",
    "VisionZip",
]
