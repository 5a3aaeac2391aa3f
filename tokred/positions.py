"""Position ids of shortened sequences: kept as they were, or numbered anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import Span
from .reduction import Reduction

POLICIES = ("keep", "renumber")
"""Keep the ids of the survivors, or number the shortened sequence as if it had come like that."""


def renumber(
    ids: torch.Tensor, before: Sequence[Span], after: Sequence[Span], reduction: Reduction
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the survivors' ids without the gaps that the dropped tokens leave.

    On every row of ids, the survivors of an item get the rank of their id among the survivors: consecutive numbers
    where there is one row, and with M-RoPE the numbers of a grid without its empty frames, rows and columns. What
    follows an item moves back by as much as the item has become shorter. Text keeps its distances.

    Args:
        ids: ids before the reduction, int64 of shape (B or 1, L), or with M-RoPE (rows, B or 1, L).
        before: the media items before the reduction.
        after: the same items after it.
        reduction: the survivors.

    Returns:
        The ids of the survivors, (B, P) or (rows, B, P), and how far each sample's later tokens move back, int64 of
        shape (B,).
    """
    batch = reduction.keep.shape[0]
    ids = ids.expand(*ids.shape[:-2], batch, -1)
    new = reduction.gather(ids, -1).clone()
    old_rows, new_rows = ids.reshape(-1, *ids.shape[-2:]), new.view(-1, *new.shape[-2:])
    shift = torch.zeros(batch, dtype=torch.int64, device=ids.device)
    for old, now in zip(before, after, strict=True):
        occupied = old_rows[:, old.sample, old.start : old.stop]
        size = 0
        if now.length:
            kept = new_rows[:, old.sample, now.start : now.stop]
            ranks = torch.stack([row.unique(return_inverse=True)[1] for row in kept])
            size = int(ranks.max()) + 1
            kept.copy_(occupied.min() - shift[old.sample] + ranks)
        change = int(occupied.max() - occupied.min()) + 1 - size
        new_rows[:, old.sample, now.stop :] -= change
        shift[old.sample] += change
    return new, shift
