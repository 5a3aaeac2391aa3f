"""PyramidDrop: drop more of the visual tokens at every quarter of the decoder."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import topk_indices
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step, check_layer
from ._common import attention_score


@dataclass(frozen=True, kw_only=True)
class PyramidDrop(BudgetMethod):
    """Before each of some layers, keep the visual tokens that the last prompt token would attend to most in that layer.

    With S layers, step s leaves `keep ** ((s + 1) / S)` of the visual tokens of the prompt, rounded down; the last step
    leaves the budget. The default halves their number three times. AdaToken-3D (arXiv 2505.12782, section 20) uses
    the same routine with the same shares.

    Args:
        keep: share of the visual tokens that survive the last step, in (0, 1].
        layers: the decoder layers whose input is shortened, ascending, at least 1. None is 8, 16 and 24 of 32, or the
            same shares of another depth.
        reference_exact: as released, round the last step down too, so that no token may be left.
    """

    name: ClassVar[str] = "pyramiddrop"
    source: ClassVar[str] = "PyramidDrop (arXiv 2410.17247), specs/vision.md section 12"
    keep: float = 0.125
    layers: tuple[int, ...] | None = None
    reference_exact: bool = False

    def _validate(self) -> None:
        super()._validate()
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        if self.layers is None:
            return
        whole = isinstance(self.layers, tuple) and all(isinstance(layer, int) for layer in self.layers)
        if not whole or not self.layers or min(self.layers) < 1 or list(self.layers) != sorted(set(self.layers)):
            raise ParameterError(f"layers={self.layers!r} is not an ascending list of positive integers")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        layers = self.layers
        if layers is None:
            layers = tuple(sorted({max(1, round(shape.num_layers * quarter / 4)) for quarter in (1, 2, 3)}))
        steps = []
        for index, layer in enumerate(layers):
            check_layer(layer, shape, self.name)
            share = (index + 1) / len(layers)
            select, count = partial(self._select, share), partial(self.step_count, share)
            steps.append(Step(Stage.DECODER_LAYER, select, frozenset({Need.NEXT_ROW}), layer, count))
        return tuple(steps)

    def step_count(self, share: float, total: int, length: int) -> int:
        """Return how many of `length` tokens, of `total` in the prompt, are left after a share of the steps."""
        left = self.num_tokens / total if self.num_tokens is not None else self.keep
        # What is a whole number must not be rounded down by the error of the power.
        rounded = math.floor(total * min(1.0, left) ** share + 1e-9)
        if not self.reference_exact:
            rounded = self.count(total) if share == 1 else max(rounded, self.count(total))
        return min(length, rounded)

    def _select(self, share: float, context: Context) -> Selection:
        length = context.hidden.shape[1]
        return Selection(self.survivors(context.observe(Need.NEXT_ROW), self.step_count(share, context.total, length)))

    @staticmethod
    def survivors(rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the survivors in ascending order, int64 of shape (G, count).

        Args:
            rows: attention probabilities of the last prompt token, (G, heads, N).
            count: how many survive, 0 to N.
        """
        return topk_indices(attention_score(rows), count).sort(dim=-1).values
