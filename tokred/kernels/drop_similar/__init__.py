"""Removal of near duplicates, round by round."""

from torch import Tensor

from . import fast, naive

__all__ = ["drop_similar", "fast", "naive"]


def drop_similar(x: Tensor, order: Tensor, k: int, per_round: int) -> Tensor:
    """Drop rows that resemble another one until `k` are left.

    In each round the rows that are left are dealt alternately into two halves. Of the first half those go whose largest
    cosine similarity to a row of the second is highest, the lowest place in the half first among equals. The next round
    lists what is left of the first half by falling similarity, then the second half as it was. This is the
    duplicate removal of VisPruner (arXiv 2412.01818v2). Half-precision input is compared in float32. A zero row has
    cosine 0 with everything.

    Args:
        x: `(G, N, D)`, floating point, finite; groups are independent.
        order: the rows that take part, in the order of the first deal, `(G, M)`, int64, distinct within a group.
        k: how many stay, `0 <= k <= M`.
        per_round: how many go in one round at most, at least 1; never more than the first half.

    Returns:
        `(G, k)`, int64, values of `order`, in the order of the last round.

    Raises:
        ValueError: the shapes do not fit together, `k` is outside `[0, M]`, or `per_round` is below 1.
    """
    if x.dim() != 3 or order.dim() != 2 or x.shape[0] != order.shape[0]:
        raise ValueError(f"expected x (G, N, D) and order (G, M), got {tuple(x.shape)} and {tuple(order.shape)}")
    if not 0 <= k <= order.shape[1]:
        raise ValueError(f"k must lie in [0, {order.shape[1]}] for order of shape {tuple(order.shape)}, got {k}")
    if per_round < 1:
        raise ValueError(f"per_round must be at least 1, got {per_round}")
    return fast.drop_similar(x, order, k, per_round)
