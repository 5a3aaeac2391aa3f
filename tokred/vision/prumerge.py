"""PruMerge: keep the patches that stand out to the CLS token, and let them and one more token absorb the others."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import gather, nearest, topk_indices
from ..method import BudgetMethod, Context, ModelShape, Need, Observation, Selection, Stage, Step
from ._common import attention_score, check_tower_layer, evenly, places_of, tower_layer


@dataclass(frozen=True, kw_only=True)
class PruMerge(BudgetMethod):
    """Keep the patches whose attention from the CLS token is an outlier, add to each the patches with the most similar
    keys, weighted by their attention, and put the weighted sum of all patches that are not kept into one more token.

    An outlier lies above Q3 + 1.5 (Q3 - Q1) of the attention in its image. Keys have all heads side by side. Kept
    patches are added to each other too, each as it was before, and no sum is divided by its weights. The token for the
    rest takes the last place that no patch needs; with a budget of one token there is none. This is what
    `token_prune_merge_advanced` and `token_prune_merge_advanced_plus` do in
    llava/model/multimodal_encoder/clip_encoder.py of the release; the text of the paper was not at hand.

    Args:
        keep: share of the patches that survive, in (0, 1]: those with the largest attention and the token for the rest.
            None lets the outliers decide, image by image.
        neighbours: how many patches each kept one absorbs, at least 0. The release has 32, for training 16.
        plus: PruMerge+, which keeps evenly spaced patches too: with outliers every s-th patch, where s is a third of
            the number of patches for each outlier; with a budget half of it, spread over the patches that are left.
        layer: the tower layer whose attention and keys are read, 0-based. None is the last one, as released; its input
            is the feature of LLaVA. A tower that was trained without that layer, as the shipped scene model's was,
            needs another one.
        reference_exact: as released, join the heads into one before attention is computed, and take no evenly spaced
            patch from the last place. The release also lets the images of a batch share one number of outliers, and
            with `plus` and a fixed share it may name a patch twice; neither is reproduced.
    """

    name: ClassVar[str] = "prumerge"
    source: ClassVar[str] = "LLaVA-PruMerge (arXiv 2403.15388), github.com/42Shawn/LLaVA-PruMerge"
    scopes: ClassVar[tuple[str, ...]] = ("item",)
    adaptive: ClassVar[bool] = True
    keep: float | None = None  # type: ignore[assignment]
    neighbours: int = 32
    plus: bool = False
    layer: int | None = None
    reference_exact: bool = False

    def _validate(self) -> None:
        super()._validate()
        if not isinstance(self.neighbours, int) or self.neighbours < 0:
            raise ParameterError(f"neighbours={self.neighbours!r} is not an integer of at least 0")
        check_tower_layer(self.layer)

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        layer = tower_layer(shape.tower_layers - 1 if self.layer is None else self.layer, shape, self.name)
        row = (Need.CLS_JOINT_ROW if self.reference_exact else Need.CLS_ROW).at(layer)
        keys = Need.TOWER_HEAD_KEYS.at(layer)
        return (Step(Stage.PROJECTOR, partial(self._select, row, keys), frozenset({row, keys})),)

    def count(self, length: int) -> int | None:  # type: ignore[override]
        """Return the number of survivors among `length` tokens: as every budget, None if outliers decide."""
        if self.keep is None and self.num_tokens is None:
            return 1 if length == 1 else None
        return super().count(length)

    def _select(self, row: Observation, keys: Observation, context: Context) -> Selection:
        attention = attention_score(context.observe(row)[..., 1:])
        return self.merge(attention, context.observe(keys)[:, 1:], context.hidden)

    def merge(self, attention: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> Selection:
        """Return the survivors of images of N patches each, at least 2.

        Args:
            attention: what the CLS query pays to the patches, (G, N).
            keys: keys of the patches, (G, N, C).
            hidden: hidden states of the patches, (G, N, D).
        """
        groups, length = attention.shape
        chosen = self._chosen(attention)
        rest = ~chosen
        last = rest & (rest.cumsum(1) == rest.sum(1, keepdim=True)) & (self.count(length) != 1)

        keep = places_of(chosen)
        index = keep.clamp(min=0)
        similarity, near = nearest(gather(keys, index), keys, min(self.neighbours, length - 1), exclude=index)
        weights = attention.to(hidden.dtype)
        absorbed = hidden.new_zeros(groups, keep.shape[1], length)
        absorbed.scatter_(2, near, weights.unsqueeze(1).expand_as(absorbed).gather(2, near))
        rows = Selection(keep).spread(gather(hidden, index) + absorbed @ hidden, length, 0.0)
        rows = torch.where(last.unsqueeze(2), (weights * rest).unsqueeze(1) @ hidden, rows)

        # Most similar is the survivor that a token is said to be in; below any cosine lies the token for the rest.
        closeness = similarity.new_full((groups, keep.shape[1] + 1, length), -torch.inf)
        closeness[:, :-1].scatter_(2, near, similarity.masked_fill(keep.unsqueeze(2) < 0, -torch.inf))
        closeness[:, -1] = -2.0
        place = torch.where(last.any(1), last.int().argmax(1), -1)
        merged_into = torch.cat([keep, place.unsqueeze(1)], dim=1).gather(1, closeness.argmax(1))

        survivors = places_of(chosen | last)
        return Selection(survivors, gather(rows, survivors.clamp(min=0)), merged_into.masked_fill(chosen, -1))

    def _chosen(self, attention: torch.Tensor) -> torch.Tensor:
        """Return which patches are kept, bool of shape (G, N)."""
        groups, length = attention.shape
        count = self.count(length)
        if count is None:
            return self._outliers(attention.float())
        # The token for the rest is one of the budget.
        patches = max(1, count - 1)
        spread = patches // 2 if self.plus else 0
        chosen = torch.zeros_like(attention, dtype=torch.bool)
        chosen.scatter_(1, topk_indices(attention, patches - spread), True)
        others = (~chosen).nonzero()[:, 1].view(groups, -1)
        return chosen.scatter(1, others[:, evenly(others.shape[1], spread, attention.device)], True)

    def _outliers(self, attention: torch.Tensor) -> torch.Tensor:
        """Return which patches stand out, and the samples of `plus`, bool of shape (G, N)."""
        quarters = attention.new_tensor([0.25, 0.75])
        low, high = torch.quantile(attention, quarters, dim=1, keepdim=True)
        outliers = attention > high + 1.5 * (high - low)
        if not self.plus:
            return outliers
        number, length = outliers.sum(1, keepdim=True), attention.shape[1]
        places = torch.arange(length, device=attention.device)
        # At most one patch of four is an outlier, and an image has two patches at least: no step is 0.
        samples = (places % (length // number.clamp(min=1) // 3) == 0) & (number > 0)
        return outliers | samples & (places < length - self.reference_exact)
