"""FastV: drop the visual tokens that the last prompt token attends to least in an early layer."""

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ParameterError
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step, check_layer
from ._common import attention_score, survivors


@dataclass(frozen=True, kw_only=True)
class FastV(BudgetMethod):
    """Keep the visual tokens with the largest attention from the last prompt token in layer `layer - 1`.

    Args:
        layer: the decoder layer whose input is shortened, at least 1.
    """

    name: ClassVar[str] = "fastv"
    source: ClassVar[str] = "FastV (arXiv 2403.06764), specs/vision.md section 4"
    layer: int = 2

    def _validate(self) -> None:
        super()._validate()
        if not isinstance(self.layer, int) or self.layer < 1:
            raise ParameterError(f"layer={self.layer!r} is not a positive integer")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        check_layer(self.layer, shape, self.name)
        return (Step(Stage.DECODER_LAYER, self._select, frozenset({Need.LAST_ROW}), self.layer),)

    def _select(self, context: Context) -> Selection:
        score = attention_score(context.observe(Need.LAST_ROW))
        return Selection(survivors(score, self.count(score.shape[-1])))
