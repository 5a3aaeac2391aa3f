"""Reduction: which tokens of a padded batch survive a step, and everything that has to move with them."""

from __future__ import annotations

import functools

import torch

from . import kernels


class Reduction:
    """The survivors of one step, per sample, with rows of different counts filled up.

    Args:
        kept: which of the tokens survive, bool of shape (B, L). Each row keeps at least one.
        fill_right: rows to fill on the right, bool of shape (B,); the others are filled on the left, which leaves the
            last token in the last place.

    Attributes:
        keep: for each place of the shortened sequence the token it holds, -1 for fill, int64 of shape (B, P).
        filled: whether any place is fill.
    """

    def __init__(self, kept: torch.Tensor, fill_right: torch.Tensor | None = None):
        batch, self.length = kept.shape
        counts = kept.sum(1)
        self.counts: list[int] = counts.tolist()
        size = max(self.counts)
        self.filled = min(self.counts) < size
        rank = kept.cumsum(1) - 1
        if self.filled:
            offset = size - counts
            if fill_right is not None:
                offset = offset.masked_fill(fill_right, 0)
            rank = rank + offset.unsqueeze(1)
            sample, token = kept.nonzero(as_tuple=True)
            self.keep = torch.full((batch, size), -1, device=kept.device)
            self.keep[sample, rank[sample, token]] = token
            # A place of fill holds the row's first survivor: any finite state does, since no query may look at it.
            first = kept.to(torch.int8).argmax(1, keepdim=True)
            self._index = torch.where(self.keep < 0, first, self.keep)
            rank = torch.where(rank < offset.unsqueeze(1), offset.unsqueeze(1), rank)
        else:
            self.keep = self._index = kept.nonzero()[:, 1].view(batch, size)
            rank = rank.clamp(min=0)
        self._rank = rank
        self._kept = kept

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return the survivors of `x` along `dim`, whose preceding axis is the batch or has length 1.

        Args:
            x: any tensor with an axis of the original length, (..., B or 1, ..., L, ...).
            dim: that axis; the batch axis is the one before it.
        """
        return _take(x, self._index, dim)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` of shape (B, P, ...) at the original length: a dropped token repeats the survivor before it."""
        return kernels.gather(x, self._rank)

    def places(self, samples: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return where survivors stand.

        Args:
            samples: rows of the batch, int64 of shape (G,).
            tokens: surviving tokens of each, int64 of shape (G, n).

        Returns:
            int64 of shape (G, n).
        """
        return self._rank[samples.unsqueeze(1), tokens]

    @functools.cached_property
    def _ends(self) -> torch.Tensor:
        """Place after the survivors among the first n tokens, int64 of shape (B, L + 1), on the host."""
        ends = torch.nn.functional.pad(self._kept.cumsum(1), (1, 0)).cpu()
        return ends + (self._rank[:, -1].cpu() + 1 - ends[:, -1]).unsqueeze(1)

    def interval(self, sample: int, start: int, stop: int) -> tuple[int, int]:
        """Return where the survivors of the tokens [start, stop) of a sample now start and stop."""
        return int(self._ends[sample, start]), int(self._ends[sample, stop])

    def dropped(self) -> torch.Tensor:
        """Return which original tokens are gone, bool of shape (B, L)."""
        gone = torch.ones((self.keep.shape[0], self.length), dtype=torch.bool, device=self.keep.device)
        return gone.scatter_(1, self._index, False)

    def then(self, later: Reduction) -> Reduction:
        """Return the reduction that does this one and then `later`, which keeps no place that this one filled."""
        composed = Reduction.__new__(Reduction)
        composed.length = self.length
        composed.filled = later.filled
        composed.counts = later.counts
        composed.keep = self.keep.gather(1, later._index).masked_fill(later.keep < 0, -1)
        composed._index = self._index.gather(1, later._index)
        composed._rank = later._rank.gather(1, self._rank)
        return composed


def _take(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    dim = dim % x.dim()
    batch = x.shape[dim - 1]
    if batch == 1 and index.shape[0] > 1:
        x = x.expand(*x.shape[: dim - 1], index.shape[0], *x.shape[dim:])
    if dim == 1:
        return kernels.gather(x, index)
    leading = x.shape[: dim - 1]
    flat = x.reshape(-1, *x.shape[dim - 1 :])
    return torch.stack([kernels.gather(part, index) for part in flat]).view(*leading, *index.shape, *x.shape[dim + 1 :])
