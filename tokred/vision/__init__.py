"""Methods for image tokens, one file each."""

from .dart import DART
from .divprune import DivPrune
from .fastv import FastV
from .hiprune import HiPrune
from .random import Random
from .uniform import Uniform
from .visionzip import VisionZip

__all__ = ["DART", "DivPrune", "FastV", "HiPrune", "Random", "Uniform", "VisionZip"]
