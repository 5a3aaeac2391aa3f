"""Greedy choice of rows that cover all rows."""

from torch import Tensor

from . import fast, naive

__all__ = ["cover", "fast", "naive"]


def cover(x: Tensor, weight: Tensor, k: int) -> Tensor:
    """Pick `k` rows one after the other, each where most is gained in covering all rows.

    A row is covered as far as its largest cosine similarity to a picked row, at least 0. The gain of a row is the sum,
    over all rows, of what picking it adds to that; the pick is the row with the largest gain times weight, the lowest
    index among equals. This is the selection of SCOPE (arXiv 2510.24214). Half-precision input is compared in float32.
    A zero row has cosine 0 with everything.

    Args:
        x: `(G, N, D)`, floating point, finite; groups are independent.
        weight: how much the gain of each row counts, `(G, N)`, at least 0.
        k: picks per group, `0 <= k <= N`.

    Returns:
        `(G, k)`, int64, values in `[0, N)`, distinct within a group, in the order of picking.

    Raises:
        ValueError: the shapes do not fit together, or `k` is outside `[0, N]`.
    """
    if x.dim() != 3 or weight.shape != x.shape[:2]:
        raise ValueError(f"expected x (G, N, D) and weight (G, N), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if not 0 <= k <= x.shape[1]:
        raise ValueError(f"k must lie in [0, {x.shape[1]}] for x of shape {tuple(x.shape)}, got {k}")
    return fast.cover(x, weight, k)
