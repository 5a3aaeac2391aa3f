"""Uniform pruning: evenly spaced tokens, the second floor under every other method."""

from dataclasses import dataclass
from typing import ClassVar

from ..method import BudgetMethod, Context, ModelShape, Selection, Step
from ._common import evenly


@dataclass(frozen=True, kw_only=True)
class Uniform(BudgetMethod):
    """Keep visual tokens at even distances in their sequence order: token floor((i + 1/2) * N / k) for i < k."""

    name: ClassVar[str] = "uniform"
    source: ClassVar[str] = "baseline"

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        return (self._pre_decoder_step(self._select),)

    def _select(self, context: Context) -> Selection:
        groups, length, _ = context.hidden.shape
        return Selection(evenly(length, self.count(length), context.hidden.device).expand(groups, -1))
