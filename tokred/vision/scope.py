"""SCOPE: keep the patches that cover the most of all patches, weighted by how much the CLS token looks at them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import cover
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step
from ._common import attention_score


@dataclass(frozen=True, kw_only=True)
class SCOPE(BudgetMethod):
    """Keep patches picked one after the other, each for what it adds to the coverage of all patches, times its
    attention from the CLS token.

    A patch is covered as far as the largest cosine, at least 0, of its features and those of a pick; what a patch adds
    is summed over all patches. Attention and features are those of the layer whose output is the feature. This is what
    `SCOPE` does in scope/clip_encoder.py of the release; the text of the paper was not at hand.

    Args:
        alpha: exponent of the attention, at least 0; 0 picks by coverage alone.
    """

    name: ClassVar[str] = "scope"
    source: ClassVar[str] = "SCOPE (arXiv 2510.24214), github.com/kinredon/SCOPE"
    scopes: ClassVar[tuple[str, ...]] = ("item",)
    alpha: float = 1.0

    def _validate(self) -> None:
        super()._validate()
        if not isinstance(self.alpha, int | float) or not math.isfinite(self.alpha) or self.alpha < 0:
            raise ParameterError(f"alpha={self.alpha!r} is not a number of at least 0")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        return (Step(Stage.PROJECTOR, self._select, frozenset({Need.CLS_ROW})),)

    def _select(self, context: Context) -> Selection:
        picks = self.picks(attention_score(context.observe(Need.CLS_ROW)[..., 1:]), context.hidden)
        return Selection(picks.sort(dim=1).values)

    def picks(self, attention: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return the picked patches in the order in which they are found.

        Args:
            attention: what the CLS query pays to the patches, (G, N).
            features: hidden states of the patches, (G, N, D).

        Returns:
            int64 of shape (G, count(N)).
        """
        return cover(features, attention.float() ** self.alpha, self.count(attention.shape[1]))
