"""CoreMatching: keep the visual tokens that fire the same neurons as the end of the question."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step, check_layer
from ._common import places_of, survivors


def affinity(media: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return how many neurons each media token shares with the query.

    Args:
        media: active neurons of the media tokens, bool of shape (G, N, neurons).
        query: active neurons of the query, bool of shape (G, neurons).

    Returns:
        int64 of shape (G, N).
    """
    # In parts, so that no second tensor of the size of the first is needed.
    return torch.cat([(part & query.unsqueeze(1)).sum(dim=2) for part in media.split(256, dim=1)], dim=1)


def elbow(score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place in the descending curve of scores that lies farthest from the chord between its ends.

    Args:
        score: int64 of shape (G, N).

    Returns:
        The place and the score there, int64 of shape (G,) each. The first place wins ties; a curve that is its own
        chord has its elbow in the first place.
    """
    curve = score.sort(dim=1, descending=True).values
    length = curve.shape[1]
    run, rise = torch.arange(length, device=score.device), curve - curve[:, :1]
    # The distance but for the length of the chord, in whole numbers.
    place = (rise * (length - 1) - run * rise[:, -1:]).abs().argmax(dim=1)
    return place, curve.gather(1, place.unsqueeze(1)).squeeze(1)


def core_tokens(score: torch.Tensor) -> torch.Tensor:
    """Return which tokens score more than the elbow of the curve, or, if none does, as much; bool of shape (G, N)."""
    bar = elbow(score)[1].unsqueeze(1)
    above = score > bar
    return torch.where(above.any(dim=1, keepdim=True), above, score == bar)


@dataclass(frozen=True, kw_only=True)
class CoreMatching(BudgetMethod):
    """Keep the visual tokens that have most active neurons in common with one of the last text tokens, in the FFN of
    layer `layer - 1`.

    This is the half of CoreMatching that removes tokens. The other half, which leaves out neurons, is not included; it
    is not part of the release either. The release zeroes keys and values of layers 5 to 18 of 32, in each by its own
    FFN, and shortens nothing. Here tokens are removed once.

    Args:
        keep: share of the visual tokens that survive, in (0, 1]. None keeps those above the elbow of the descending
            curve of shared neurons. Where none is above it, those at it stay; in the release none does.
        layer: the decoder layer whose input is shortened, at least 1. None is layer 6 of 32, behind the first FFN that
            the release looks at, or the same share of another depth.
        query: which text token decides, counted from the end of the text, at least 1; in a shorter text the first. The
            released 5 leaves out the tokens with which LLaVA's prompt asks for an answer.
    """

    name: ClassVar[str] = "corematching"
    source: ClassVar[str] = "CoreMatching (arXiv 2505.19235), specs/vision.md section 16"
    adaptive: ClassVar[bool] = True
    keep: float | None = None  # type: ignore[assignment]
    layer: int | None = None
    query: int = 5

    def _validate(self) -> None:
        super()._validate()
        if self.layer is not None and (not isinstance(self.layer, int) or self.layer < 1):
            raise ParameterError(f"layer={self.layer!r} is neither None nor a positive integer")
        if not isinstance(self.query, int) or self.query < 1:
            raise ParameterError(f"query={self.query!r} is not a positive integer")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        layer = max(1, round(shape.num_layers * 6 / 32)) if self.layer is None else self.layer
        check_layer(layer, shape, self.name)
        return (Step(Stage.DECODER_LAYER, self._select, frozenset({Need.ACTIVE_NEURONS, Need.TEXT}), layer),)

    def count(self, length: int) -> int | None:  # type: ignore[override]
        """Return the number of survivors among `length` tokens; None if the elbow decides."""
        return None if self.keep is None and self.num_tokens is None else super().count(length)

    def _select(self, context: Context) -> Selection:
        media, text = context.observe(Need.ACTIVE_NEURONS), context.observe_text(Need.ACTIVE_NEURONS)
        return Selection(self.survivors(media, text))

    def survivors(self, media: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the surviving visual tokens in ascending order.

        Args:
            media: active neurons of the visual tokens, bool of shape (G, N, neurons).
            text: active neurons of the text behind them, bool of shape (G, T, neurons). Without text no token is
                better than another.

        Returns:
            int64 of shape (G, k), with -1 behind the survivors of an item that keeps fewer than k.
        """
        length = media.shape[1]
        if text.shape[1]:
            score = affinity(media, text[:, max(0, text.shape[1] - self.query)])
        else:
            score = torch.zeros(media.shape[:2], dtype=torch.long, device=media.device)
        count = self.count(length)
        if count is not None:
            return survivors(score, count)
        return places_of(core_tokens(score))
