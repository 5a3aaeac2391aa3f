"""DART: keep a few pivots and, for each, the tokens that duplicate it least."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import gather, topk_indices
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step, check_layer


@dataclass(frozen=True, kw_only=True)
class DART(BudgetMethod):
    """Keep pivot tokens and the visual tokens least similar to each pivot.

    Args:
        layer: the decoder layer whose input is shortened, at least 1.
        pivots_image: number of visual pivots, at least 1.
        pivots_text: number of text pivots, at least 0.
        reference_exact: as released, give each pivot the same quota, `ceil(budget / pivots)`, on top of the visual
            pivots, and visit the pivots in the order of a CPython set. The count then differs from the budget. By
            default the quotas add up to the budget exactly and pivots are visited in the order of their norms.
    """

    name: ClassVar[str] = "dart"
    source: ClassVar[str] = "DART (arXiv 2502.11494), specs/vision.md section 1"
    layer: int = 2
    pivots_image: int = 4
    pivots_text: int = 4
    reference_exact: bool = False

    def _validate(self) -> None:
        super()._validate()
        for field, least in (("layer", 1), ("pivots_image", 1), ("pivots_text", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or value < least:
                raise ParameterError(f"{field}={value!r} is not an integer of at least {least}")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        check_layer(self.layer, shape, self.name)
        needs = frozenset({Need.LAYER_KEYS, Need.NORMED_HIDDEN, Need.TEXT})
        return (Step(Stage.DECODER_LAYER, self._select, needs, self.layer),)

    def count(self, length: int) -> int:
        """Return the number of survivors; under `reference_exact` with as many text pivots as asked for."""
        if not self.reference_exact:
            return super().count(length)
        return self._released_count(length, self.pivots_text)

    def _released_count(self, length: int, text_pivots: int) -> int:
        image_pivots = min(self.pivots_image, length)
        quota = self._released_quota(length, image_pivots + text_pivots)
        return min(length, image_pivots + quota * (image_pivots + text_pivots))

    def _released_quota(self, length: int, pivots: int) -> int:
        budget = self.num_tokens if self.num_tokens is not None else length * self.keep
        return math.ceil(budget // pivots)

    def _select(self, context: Context) -> Selection:
        image = context.observe(Need.NORMED_HIDDEN), context.observe(Need.LAYER_KEYS), context.positions
        text = context.observe_text(Need.NORMED_HIDDEN), context.observe_text(Need.LAYER_KEYS), context.text_positions
        return Selection(self.survivors(image, text))

    def survivors(
        self,
        image: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        text: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return the surviving visual tokens in ascending order.

        Args:
            image: of the N visual tokens the normed hidden states (G, N, D), the keys of the layer before with all
                heads side by side (G, N, C), and the positions in the sequence (G, N).
            text: the same of the T text tokens after them.

        Returns:
            int64 of shape (G, k), positions inside the item.
        """
        hidden, keys, positions = image
        text_hidden, text_keys, text_positions = text
        groups, length = positions.shape
        most = length if self.reference_exact else self.count(length)
        image_pivots = topk_indices(keys.abs().sum(-1), min(self.pivots_image, most))
        text_pivots = topk_indices(text_keys.abs().sum(-1), min(self.pivots_text, text_keys.shape[1]))
        pivots = torch.cat([gather(_unit(hidden), image_pivots), gather(_unit(text_hidden), text_pivots)], dim=1)
        similarity = pivots @ _unit(hidden).transpose(-1, -2)
        if self.reference_exact:
            places = torch.cat([positions.gather(1, image_pivots), text_positions.gather(1, text_pivots)], dim=1)
            similarity = gather(similarity, _set_order(places))

        picked = torch.zeros((groups, length), dtype=torch.bool, device=hidden.device).scatter_(1, image_pivots, True)
        kept = [image_pivots]
        for turn, quota in enumerate(self._quotas(length, image_pivots.shape[1], pivots.shape[1])):
            if quota:
                chosen = topk_indices((-similarity[:, turn]).masked_fill(picked, -torch.inf), quota)
                picked.scatter_(1, chosen, True)
                kept.append(chosen)
        return torch.cat(kept, dim=1).sort(dim=-1).values

    def _quotas(self, length: int, image_pivots: int, pivots: int) -> list[int]:
        """Return how many tokens each pivot brings in, in visiting order."""
        if self.reference_exact:
            quotas = [self._released_quota(length, pivots)] * pivots
        else:
            share, extra = divmod(self.count(length) - image_pivots, pivots)
            quotas = [share + (turn < extra) for turn in range(pivots)]
        left = length - image_pivots
        clamped = []
        for quota in quotas:
            clamped.append(min(quota, left))
            left -= clamped[-1]
        return clamped


def _set_order(places: torch.Tensor) -> torch.Tensor:
    """Return the order in which a CPython set of sequence positions lists them: that of the release."""
    orders = []
    for row in places.tolist():
        rank = {place: index for index, place in enumerate(row)}
        orders.append([rank[place] for place in set(row)])
    return torch.tensor(orders, device=places.device)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)
