"""Greedy choice of rows that lie far apart."""

from torch import Tensor

from . import fast, naive

__all__ = ["farthest_points", "fast", "naive"]


def farthest_points(x: Tensor, k: int, mask_selected: bool = True) -> Tensor:
    """Pick `k` rows one after the other, each as far as possible from all rows picked before.

    Distance is one minus cosine similarity. The first pick is the row whose nearest other row is farthest away, every
    later one maximises the smallest distance to the picks so far; the lowest index wins ties. This is the max-min
    selection of DivPrune (`specs/vision.md`, section 2). Half-precision input is compared in float32.

    Args:
        x: `(G, N, D)`, floating point, finite; groups are independent.
        k: picks per group, `0 <= k <= N`.
        mask_selected: exclude rows that were picked. False reproduces the released code, which repeats a row once all
            remaining ones are duplicates of picks.

    Returns:
        `(G, k)`, int64, values in `[0, N)`, in the order of picking.

    Raises:
        ValueError: `x` is not 3-D, or `k` is outside `[0, N]`.
    """
    if x.dim() != 3:
        raise ValueError(f"expected x (G, N, D), got shape {tuple(x.shape)}")
    if not 0 <= k <= x.shape[1]:
        raise ValueError(f"k must lie in [0, {x.shape[1]}] for x of shape {tuple(x.shape)}, got {k}")
    return fast.farthest_points(x, k, mask_selected)
