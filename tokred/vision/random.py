"""Random pruning: the floor under every other method."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..method import BudgetMethod, Context, ModelShape, Selection, Step


@dataclass(frozen=True, kw_only=True)
class Random(BudgetMethod):
    """Keep a uniformly random subset of the visual tokens.

    The subset depends on the seed and the number of tokens alone, so a row of a batch is pruned as it is on its own.

    Args:
        seed: seed of the private generator.
    """

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "baseline"
    seed: int = 0

    def _validate(self) -> None:
        super()._validate()
        if not isinstance(self.seed, int):
            raise ParameterError(f"seed={self.seed!r} is not an integer")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        return (self._pre_decoder_step(self._select),)

    def _select(self, context: Context) -> Selection:
        groups, length, _ = context.hidden.shape
        generator = torch.Generator().manual_seed(self.seed)
        keep = torch.randperm(length, generator=generator)[: self.count(length)].sort().values
        return Selection(keep.to(context.hidden.device).expand(groups, -1))
