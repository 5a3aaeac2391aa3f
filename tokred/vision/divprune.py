"""DivPrune: the subset of visual tokens that are farthest from each other."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..kernels import farthest_points
from ..method import BudgetMethod, Context, ModelShape, Selection, Step


@dataclass(frozen=True, kw_only=True)
class DivPrune(BudgetMethod):
    """Keep the tokens found by greedy max-min diversity under cosine distance.

    Args:
        reference_exact: as released, never exclude a picked token from later picks. Among exact duplicates the
            release then picks a token twice and keeps fewer; by default every pick is a new token.
    """

    name: ClassVar[str] = "divprune"
    source: ClassVar[str] = "DivPrune (arXiv 2503.02175), specs/vision.md section 2"
    reference_exact: bool = False

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        return (self._pre_decoder_step(self._select),)

    def picks(self, features: torch.Tensor) -> torch.Tensor:
        """Return the picked tokens in the order in which the greedy search finds them.

        Args:
            features: visual tokens, (G, N, D).

        Returns:
            int64 of shape (G, count(N)).
        """
        return farthest_points(features, self.count(features.shape[1]), mask_selected=not self.reference_exact)

    def _select(self, context: Context) -> Selection:
        return Selection(self.picks(context.hidden).sort(dim=-1).values)
