"""PyramidDrop: drop more of the visual tokens at every quarter of the decoder."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..method import Context, Need
from ._common import StagedMethod, attention_score


@dataclass(frozen=True, kw_only=True)
class PyramidDrop(StagedMethod):
    """Before each of some layers, keep the visual tokens that the last prompt token would attend to most in that layer.

    The default halves their number before layers 8, 16 and 24 of 32. AdaToken-3D (arXiv 2505.12782,
    specs/vision.md section 20) is the same routine with the same shares.
    """

    name: ClassVar[str] = "pyramiddrop"
    source: ClassVar[str] = "PyramidDrop (arXiv 2410.17247), specs/vision.md section 12"
    depths: ClassVar[tuple[float, ...]] = (1 / 4, 1 / 2, 3 / 4)
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NEXT_ROW})
    keep: float = 0.125

    def score(self, context: Context) -> torch.Tensor:
        return attention_score(context.observe(Need.NEXT_ROW))
