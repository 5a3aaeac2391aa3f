"""ToMe: merge the tokens of an image encoder that have the most similar keys, a few in every block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ParameterError
from ..kernels import gather, match
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step


def schedule(blocks: int, r: int | tuple[int, ...], inflect: float = 0.0) -> list[int]:
    """Return how many tokens each block merges away.

    Args:
        blocks: number of blocks.
        r: tokens per block, or one number for each of the first blocks; the others merge none.
        inflect: slope over depth, in [-1, 1]: 0 is constant, -1 falls from `2 r` to 0, 1 rises.
    """
    if isinstance(r, tuple):
        return [*r, *[0] * (blocks - len(r))][:blocks]
    low = math.floor(r * (1 - inflect))
    slope = 2 * (r - low) / max(1, blocks - 1)
    return [math.floor(low + slope * block) for block in range(blocks)]


@dataclass(frozen=True)
class Pairs:
    """Which tokens merge.

    Args:
        keep: places of the survivors in their new order, int64 of shape (G, k).
        sources: places of the others, int64 of shape (G, r).
        targets: the survivor that each of them goes into, int64 of shape (G, r).
    """

    keep: Tensor
    sources: Tensor
    targets: Tensor


def pair_tokens(keys: Tensor, r: int, prefix: int) -> Pairs:
    """Match tokens at even places with those at odd places, and merge the `r` pairs with the most similar keys.

    Args:
        keys: one vector per token, (G, T, C).
        r: number of pairs; no more than half of the tokens behind the prefix merge.
        prefix: number of leading tokens that neither merge nor absorb.

    Returns:
        Survivors in this order: the prefix, then those at even places, ascending, or by falling similarity to their
        match if there is no prefix, then those at odd places.
    """
    groups, length = keys.shape[:2]
    r = min(r, (length - prefix) // 2)
    even, odd = (torch.arange(first, length, 2, device=keys.device) for first in (0, 1))
    even, odd = even[even >= prefix], odd[odd >= prefix]
    similarity, partner = match(keys[:, even], keys[:, odd])
    order = similarity.sort(dim=1, descending=True, stable=True).indices
    merging, rest = order[:, :r], order[:, r:]
    if prefix:
        rest = rest.sort(dim=1).values
    leading = torch.arange(prefix, device=keys.device).expand(groups, -1)
    keep = torch.cat([leading, even[rest], odd.expand(groups, -1)], dim=1)
    return Pairs(keep, even[merging], odd[partner.gather(1, merging)])


def pair_with_every(keys: Tensor, every: int, prefix: int) -> Pairs:
    """Match all tokens with every `every`-th one, the last of its group, and merge all of them.

    Args:
        keys: one vector per token, (G, T, C).
        every: size of a group, at least 2. Tokens behind the last whole group stay.
        prefix: number of leading tokens that neither merge nor absorb.
    """
    groups, length = keys.shape[:2]
    place = torch.arange(prefix, length, device=keys.device)
    whole = place[: len(place) // every * every].view(-1, every)
    targets, sources = whole[:, -1], whole[:, :-1].flatten()
    partner = match(keys[:, sources], keys[:, targets])[1]
    leading = torch.arange(prefix, device=keys.device)
    keep = torch.cat([leading, targets, place[whole.numel() :]])
    return Pairs(keep.expand(groups, -1), sources.expand(groups, -1), targets[partner])


def merge(x: Tensor, sizes: Tensor, pairs: Pairs) -> Tensor:
    """Return the states of the survivors, each the mean of what it now stands for.

    Args:
        x: hidden states, (G, T, D).
        sizes: how many tokens each one stands for, (G, T).
        pairs: which tokens merge.

    Returns:
        (G, k, D).
    """
    rows = gather(x, pairs.keep)
    place = torch.zeros_like(sizes, dtype=torch.int64)
    place.scatter_(1, pairs.keep, torch.arange(rows.shape[1], device=x.device).expand(len(x), -1))
    joining = sizes.gather(1, pairs.sources)
    share = joining / sizes.scatter_add(1, pairs.targets, joining).gather(1, pairs.targets)
    # The mean moves from the target towards each source by the source's share.
    moves = (gather(x, pairs.sources) - gather(x, pairs.targets)) * share.unsqueeze(-1)
    into = place.gather(1, pairs.targets).unsqueeze(-1).expand_as(moves)
    return rows.scatter_add_(1, into, moves.to(rows.dtype))


@dataclass(frozen=True, kw_only=True)
class ToMe(BudgetMethod):
    """Merge the tokens of an image encoder with the most similar keys, between attention and MLP of its blocks.

    Tokens in front of the patches, such as CLS and registers, never merge. A block can merge half of the patches at
    most, so a shallow encoder may not reach a small `keep`.

    Args:
        keep: share of the patches that is left after the last block, in (0, 1], if `r` and `every` are None.
        r: number of tokens that each block merges away, at least 0, or a list with one number for each of the first
            blocks.
        inflect: how that number runs over depth, in [-1, 1]: 0 is constant, -1 falls from twice the mean to zero, 1 is
            the reverse.
        every: merge all patches into every `every`-th one, in the first block alone; at least 2.
        prop_attn: weigh every token in attention by the number of patches that it stands for.
        restore: give the encoder's output its full length again, each patch with the state that it was merged into.
            Then a mean over patches weighs merged ones rightly, and dense heads find their grid.
    """

    name: ClassVar[str] = "tome"
    source: ClassVar[str] = "ToMe (arXiv 2210.09461), specs/vision.md section 3"
    scopes: ClassVar[tuple[str, ...]] = ("item",)
    keep: float = 0.5
    r: int | tuple[int, ...] | None = None
    inflect: float = 0.0
    every: int | None = None
    prop_attn: bool = True
    restore: bool = True

    def _validate(self) -> None:
        super()._validate()
        if isinstance(self.r, list):
            object.__setattr__(self, "r", tuple(self.r))
        numbers = self.r if isinstance(self.r, tuple) else (self.r or 0,)
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ParameterError(f"r={self.r!r} is neither None, a number of tokens nor a list of such numbers")
        if not isinstance(self.inflect, int | float) or not -1 <= self.inflect <= 1:
            raise ParameterError(f"inflect={self.inflect!r} is not in [-1, 1]")
        if self.every is not None and (not isinstance(self.every, int) or self.every < 2):
            raise ParameterError(f"every={self.every!r} is neither None nor an integer of at least 2")
        if self.every is not None and self.r is not None:
            raise ParameterError("r and every exclude each other")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        blocks = shape.tower_layers if shape.feature_layers is None else shape.feature_layers
        if self.every is not None:
            return (self._step(0, self._left_by_every),)
        if self.r is not None:
            numbers = schedule(blocks, self.r, self.inflect)
            return tuple(self._step(block, partial(self._left_by_r, r)) for block, r in enumerate(numbers) if r)
        # Of what has to go, how much is gone after each block.
        gone = list(accumulate(1 + self.inflect * (2 * block / max(1, blocks - 1) - 1) for block in range(blocks)))
        return tuple(
            self._step(block, partial(self._left_by_keep, part / gone[-1], blocks - 1 - block))
            for block, part in enumerate(gone)
        )

    def _step(self, block: int, left: Callable[[int, int], int]) -> Step:
        select = partial(self._select, left)
        return Step(Stage.ENCODER_BLOCK, select, frozenset({Need.TOWER_KEYS}), block, left, self.prop_attn)

    def count(self, length: int) -> int | None:  # type: ignore[override]
        """Return `length` if nothing merges; else None, since it depends on the number of blocks."""
        inert = super().count(length) == length if self.r is None else not any(schedule(1, self.r))
        return length if inert and self.every is None else None

    def _left_by_every(self, total: int, left: int) -> int:
        groups = left // (self.every or 1)
        return left - groups * ((self.every or 1) - 1)

    def _left_by_r(self, r: int, total: int, left: int) -> int:
        return left - min(r, left // 2)

    def _left_by_keep(self, gone: float, blocks: int, total: int, left: int) -> int:
        """Return how many are left when a share of what has to go is gone and so many blocks are still to come."""
        last = super().count(total)
        # Each of the blocks to come can halve what is left, and no more.
        goal = min(total - math.floor((total - last) * gone + 1e-9), last << blocks)
        return max(left - left // 2, min(left, goal))

    def _select(self, left: Callable[[int, int], int], context: Context) -> Selection:
        keys, prefix = context.observe(Need.TOWER_KEYS), context.prefix
        patches = keys.shape[1] - prefix
        if self.every is not None:
            pairs = pair_with_every(keys, self.every, prefix)
        else:
            pairs = pair_tokens(keys, patches - left(context.total, patches), prefix)
        assert context.sizes is not None
        merged_into = torch.full(keys.shape[:2], -1, device=keys.device).scatter_(1, pairs.sources, pairs.targets)
        return Selection(pairs.keep, merge(context.hidden, context.sizes, pairs), merged_into)
