"""AdaptInfer: the text tokens that matter to the text decide which visual tokens matter."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..method import Context, Need
from ._common import StagedMethod


def weighted_attention(to_text: torch.Tensor, to_media: torch.Tensor) -> torch.Tensor:
    """Return the attention that media tokens receive, each text token counting as much as it matters to the text.

    Args:
        to_text: attention of the text tokens to each other, (G, heads, T, T).
        to_media: attention of the text tokens to the media tokens, (G, heads, T, N).

    Returns:
        (G, N).
    """
    both = to_text + to_text.mT - torch.diag_embed(to_text.diagonal(dim1=-2, dim2=-1))
    return (both.sum(dim=-2).unsqueeze(-2) @ to_media).squeeze(-2).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class AdaptInfer(StagedMethod):
    """After each of some layers, keep the visual tokens that receive most attention from the text behind them, where
    every text token counts as much as the attention that it exchanges with the rest of that text.

    The default steps are those of LLaVA, before layers 2, 11 and 21 of 32. The releases have a table of budgets for
    each model; three steps have the shape of that for Qwen2-VL here, which leaves 17, 10 and 3 %.
    """

    name: ClassVar[str] = "adaptinfer"
    source: ClassVar[str] = "AdaptInfer (weiczh02/AdaptInfer-base), specs/vision.md section 18"
    depths: ClassVar[tuple[float, ...]] = (2 / 32, 11 / 32, 21 / 32)
    released: ClassVar[tuple[float, ...]] = (0.17, 0.17 * 0.6, 0.17 * 0.6 * 0.3)
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEXT_ROWS, Need.TEXT})

    def score(self, context: Context) -> torch.Tensor:
        return weighted_attention(context.observe_text(Need.TEXT_ROWS), context.observe(Need.TEXT_ROWS))
