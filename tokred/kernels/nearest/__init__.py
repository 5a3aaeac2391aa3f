"""Nearest rows by cosine similarity."""

from torch import Tensor

from . import fast, naive

__all__ = ["fast", "naive", "nearest"]


def nearest(a: Tensor, b: Tensor, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find for each row of `a` the `k` rows of `b` with the largest cosine similarity.

    Half-precision input is compared in float32. A zero row has cosine 0 with everything.

    Args:
        a: `(G, M, D)`, floating point.
        b: `(G, N, D)`, floating point.
        k: how many to find, 0 to the number of rows that count.
        exclude: for each row of `a` one row of `b` that does not count, itself for example, `(G, M)`, int64; None for
            all count.

    Returns:
        The similarities `(G, M, k)`, float32 (float64 for float64 input), about `[-1, 1]`, best first, and the rows of
        `b`, `(G, M, k)`, int64, values in `[0, N)`; equal similarities give the lowest row first.

    Raises:
        ValueError: the shapes do not fit together, or `b` has fewer than `k` rows that count.
    """
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[2]:
        raise ValueError(f"expected a (G, M, D) and b (G, N, D), got {tuple(a.shape)} and {tuple(b.shape)}")
    if exclude is not None and exclude.shape != a.shape[:2]:
        raise ValueError(f"expected exclude (G, M) for a of shape {tuple(a.shape)}, got {tuple(exclude.shape)}")
    most = max(0, b.shape[1] - (exclude is not None))
    if not 0 <= k <= most:
        raise ValueError(f"k must lie in [0, {most}] for b of shape {tuple(b.shape)}, got {k}")
    return fast.nearest(a, b, k, exclude)
