"""HiPrune: anchors from a middle layer of the tower, the tokens around them, and registers from its last layer."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import gather, topk_indices
from ..method import BudgetMethod, Context, ModelShape, Need, Observation, Selection, Stage, Step
from ._common import check_tower_layer, tower_layer


@dataclass(frozen=True, kw_only=True)
class HiPrune(BudgetMethod):
    """Keep the tokens that receive most attention in the middle of the tower, their neighbours, and, for the rest of
    the budget, the tokens that receive most attention at its end.

    Args:
        alpha: share of the budget for anchors and their neighbours, in [0, 1].
        layer: the tower layer whose attention chooses the anchors, 0-based. None is layer 8 of 24, or the same share of
            another depth, where tokens can leave before the projector; elsewhere layer 15 of 32.
        reference_exact: as released, a neighbour beyond the border is the nearest token of the raster instead: the
            last token of the row above, or the first or last token of all. By default it does not exist, and its place
            goes to a register.
    """

    name: ClassVar[str] = "hiprune"
    source: ClassVar[str] = "HiPrune (arXiv 2508.00553), specs/vision.md section 6"
    scopes: ClassVar[tuple[str, ...]] = ("item",)
    alpha: float = 0.1
    layer: int | None = None
    reference_exact: bool = False

    def _validate(self) -> None:
        super()._validate()
        if not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise ParameterError(f"alpha={self.alpha!r} is not a share in [0, 1]")
        check_tower_layer(self.layer)

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        layer = self.layer
        if layer is None:
            layer = (shape.tower_layers * 3 // 8 if shape.rowwise_projector else shape.tower_layers // 2) - 1
        shallow = Need.COLUMN_SUM.at(tower_layer(layer, shape, self.name))
        stage = Stage.PROJECTOR if shape.rowwise_projector else Stage.FEATURES
        return (Step(stage, partial(self._select, shallow), frozenset({shallow, Need.COLUMN_SUM, Need.GRID})),)

    def _select(self, shallow: Observation, context: Context) -> Selection:
        seen = context.observe(shallow), context.observe(Need.COLUMN_SUM)
        return Selection(self.survivors(*seen, context.observe(Need.GRID)))

    def survivors(self, shallow: torch.Tensor, deep: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Return the surviving tokens in ascending order.

        Args:
            shallow: attention that the tokens receive in the middle of the tower, (G, N).
            deep: the same at its end, (G, N).
            grid: frame, view, row and column of the tokens in raster order, int64 of shape (G, N, 4).

        Returns:
            int64 of shape (G, count(N)).
        """
        budget = self.count(shallow.shape[1])
        anchors = topk_indices(shallow, round(budget * self.alpha / 5))
        # Anchors come first, then what stands around them, then the others; among equals attention at the end decides.
        level = torch.zeros_like(deep, dtype=torch.int8)
        around, exists = self._around(anchors, grid)
        level.scatter_reduce_(1, around, exists.to(torch.int8), "amax")
        level.scatter_(1, anchors, 2)
        order = deep.sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, level.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
        return order[:, :budget].sort(dim=1).values

    def _around(self, anchors: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens left, right, above and below of anchors (G, a), int64 (G, 4 a), and whether they exist."""
        width = grid[:, :, 3].amax(dim=1, keepdim=True) + 1
        moves = ((-1, (0, 0, 0, -1)), (1, (0, 0, 0, 1)), (-width, (0, 0, -1, 0)), (width, (0, 0, 1, 0)))
        places, exist = [], []
        for step, change in moves:
            place = (anchors + step).clamp(0, grid.shape[1] - 1)
            wanted = gather(grid, anchors) + torch.tensor(change, device=grid.device)
            places.append(place)
            exist.append((gather(grid, place) == wanted).all(dim=2) | self.reference_exact)
        return torch.cat(places, dim=1), torch.cat(exist, dim=1)
