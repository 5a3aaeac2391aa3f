"""A method with known survivors, for tests of everything but the choice of tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from tokred import Context, Method, ModelShape, PruMerge, Selection, Stage, Step


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


@dataclass(frozen=True, kw_only=True)
class Positive(Method):
    """Keep the first token of every media item, and those whose first number is positive: as many as there are.

    Args:
        site: `"features"`, `"embeds"`, or the decoder layer whose input is shortened.
    """

    name: ClassVar[str] = "positive"
    source: ClassVar[str] = "tests"
    site: str | int = "features"

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        if isinstance(self.site, int):
            return (Step(Stage.DECODER_LAYER, self._select, layer=self.site),)
        return (Step(Stage(self.site), self._select),)

    def count(self, length: int) -> None:
        return None

    def _select(self, context: Context) -> Selection:
        kept = context.hidden[..., 0] > 0
        kept[:, 0] = True
        places = torch.arange(kept.shape[1]).masked_fill(~kept, kept.shape[1]).sort(dim=1).values
        keep = places[:, : int(kept.sum(1).max())]
        return Selection(keep.masked_fill(keep == kept.shape[1], -1))


PROBES = {
    "features": Every2(),
    "embeds": Every2(site="embeds"),
    "layer2": Every2(site=2),
    "ragged": [Positive(), Positive(site=2)],
    "three": [Every2(), Every2(site=1), Every2(site=3)],
}

# Methods that look at a tower's CLS token or merge in blocks of all patches, neither of which the towers of Qwen have.
NEEDS_CLS = ("fastervlm", "prumerge", "scope", "tome", "visionzip", "vispruner")

# Methods before the projector whose images decide how many tokens they keep.
ADAPTIVE = (PruMerge(neighbours=4), PruMerge(neighbours=4, plus=True))
