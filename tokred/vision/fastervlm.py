"""FasterVLM: keep the patches that the CLS token of the tower attends to most."""

from dataclasses import dataclass
from typing import ClassVar

from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step
from ._common import attention_score, survivors


@dataclass(frozen=True, kw_only=True)
class FasterVLM(BudgetMethod):
    """Keep the patches with the largest attention, mean over heads, from the CLS token where the features are taken."""

    name: ClassVar[str] = "fastervlm"
    source: ClassVar[str] = "FasterVLM (arXiv 2412.01818v1)"
    scopes: ClassVar[tuple[str, ...]] = ("item",)

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        return (Step(Stage.PROJECTOR, self._select, frozenset({Need.CLS_ROW})),)

    def _select(self, context: Context) -> Selection:
        score = attention_score(context.observe(Need.CLS_ROW)[..., 1:])
        return Selection(survivors(score, self.count(score.shape[-1])))
