"""A method with known survivors, for tests of everything but the choice of tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from tokred import Context, Method, ModelShape, Selection, Stage, Step


@dataclass(frozen=True, kw_only=True)
class Every2(Method):
    """Keep tokens 0, 2, 4, ... of every media item.

    Args:
        site: `"features"`, `"embeds"`, or the decoder layer whose input is shortened.
        positions: which position ids the survivors get.
    """

    name: ClassVar[str] = "every2"
    source: ClassVar[str] = "tests"
    site: str | int = "features"
    positions: str = "keep"

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        if isinstance(self.site, int):
            return (Step(Stage.DECODER_LAYER, self._select, layer=self.site),)
        return (Step(Stage(self.site), self._select),)

    def count(self, length: int) -> int:
        return (length + 1) // 2

    def _select(self, context: Context) -> Selection:
        groups, length, _ = context.hidden.shape
        return Selection(torch.arange(0, length, 2).expand(groups, -1))


PROBES = {
    "features": Every2(),
    "embeds": Every2(site="embeds"),
    "layer2": Every2(site=2),
    "three": [Every2(), Every2(site=1), Every2(site=3)],
}

# Methods that look through a tower's CLS token, which the towers of Qwen do not have.
NEEDS_CLS = ("fastervlm", "visionzip")
