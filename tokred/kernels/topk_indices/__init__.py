"""Indices of the best scores in a fully specified order."""

from torch import Tensor

from . import fast, naive

__all__ = ["fast", "naive", "topk_indices"]


def topk_indices(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the `k` largest scores, best first, equal scores lowest index first.

    Unlike `torch.topk` the result does not depend on device or version: ties keep their order and NaN ranks below
    every number, `-inf` included.

    Args:
        scores: `(..., N)`, any real dtype.
        k: how many to take, `0 <= k <= N`.

    Returns:
        `(..., k)`, int64, values in `[0, N)`, distinct within a row.

    Raises:
        ValueError: `scores` has no dimension, or `k` is outside `[0, N]`.
    """
    if scores.dim() == 0:
        raise ValueError("scores needs at least one dimension, got a scalar")
    if not 0 <= k <= scores.shape[-1]:
        raise ValueError(f"k must lie in [0, {scores.shape[-1]}] for scores of shape {tuple(scores.shape)}, got {k}")
    return fast.topk_indices(scores, k)
