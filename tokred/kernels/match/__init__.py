"""Nearest row by cosine similarity."""

from torch import Tensor

from . import fast, naive

__all__ = ["fast", "match", "naive"]


def match(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Find for each row of `a` the row of `b` with the largest cosine similarity.

    Half-precision input is compared in float32. A zero row has cosine 0 with everything.

    Args:
        a: `(G, M, D)`, floating point.
        b: `(G, N, D)`, floating point, `N >= 1` unless `M` is 0.

    Returns:
        The similarities `(G, M)`, float32 (float64 for float64 input), about `[-1, 1]`, and the rows of `b`, `(G, M)`,
        int64, values in `[0, N)`; equal similarities give the lowest row.

    Raises:
        ValueError: the shapes do not fit together, or `b` has no rows to match.
    """
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[2]:
        raise ValueError(f"expected a (G, M, D) and b (G, N, D), got {tuple(a.shape)} and {tuple(b.shape)}")
    if b.shape[1] == 0 and a.shape[1] > 0:
        raise ValueError(f"cannot match {a.shape[1]} rows with none: b has shape {tuple(b.shape)}")
    return fast.match(a, b)
