"""VisPruner: keep the patches that the CLS token looks at, and of the others those that resemble no other one."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import drop_similar, topk_indices
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step
from ._common import attention_score


@dataclass(frozen=True, kw_only=True)
class VisPruner(BudgetMethod):
    """Keep the patches with the largest attention from the CLS token, and thin out the others by removing duplicates.

    The others, by falling attention, are dealt alternately into two halves; of the first half those go that are most
    similar, by the cosine of their features, to one of the second; so on until the budget is reached. Attention, mean
    over heads, and features are those of the layer whose output is the feature. This is what `encode_images` does in
    llava/model/llava_arch.py of the release, which fails where an odd number of patches is dealt; here the first half
    is one larger then. The text of the paper was not at hand.

    Args:
        important_share: share of the budget, rounded down, for the patches with the largest attention, in [0, 1].
        per_round: how many patches go in one round, at least 1.
    """

    name: ClassVar[str] = "vispruner"
    source: ClassVar[str] = "VisPruner (arXiv 2412.01818v2), github.com/Theia-4869/VisPruner"
    scopes: ClassVar[tuple[str, ...]] = ("item",)
    important_share: float = 0.5
    per_round: int = 8

    def _validate(self) -> None:
        super()._validate()
        if not isinstance(self.important_share, int | float) or not 0 <= self.important_share <= 1:
            raise ParameterError(f"important_share={self.important_share!r} is not a share in [0, 1]")
        if not isinstance(self.per_round, int) or self.per_round < 1:
            raise ParameterError(f"per_round={self.per_round!r} is not a positive integer")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        return (Step(Stage.PROJECTOR, self._select, frozenset({Need.CLS_ROW})),)

    def _select(self, context: Context) -> Selection:
        return Selection(self.survivors(attention_score(context.observe(Need.CLS_ROW)[..., 1:]), context.hidden))

    def survivors(self, attention: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return the surviving patches in ascending order.

        Args:
            attention: what the CLS query pays to the patches, (G, N).
            features: hidden states of the patches, (G, N, D).

        Returns:
            int64 of shape (G, count(N)).
        """
        budget = self.count(attention.shape[1])
        important = int(budget * self.important_share)
        order = topk_indices(attention, attention.shape[1])
        diverse = drop_similar(features, order[:, important:], budget - important, self.per_round)
        return torch.cat([order[:, :important], diverse], dim=1).sort(dim=1).values
