"""Selected rows of every sample."""

from torch import Tensor

from . import fast, naive

__all__ = ["fast", "gather", "naive"]


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Take rows along dimension 1, for each sample its own.

    Differentiable with respect to `x`.

    Args:
        x: `(B, L, ...)`, any dtype, any strides.
        index: `(B, P)`, int64, values in `[0, L)`; repeats are allowed.

    Returns:
        `(B, P, ...)` with `out[b, p] = x[b, index[b, p]]`, a new tensor of the dtype of `x`.

    Raises:
        ValueError: the shapes do not fit together.
        IndexError: an index is outside `[0, L)`; on CUDA a device-side assertion or, in a batch, nothing reports it,
            since a check would stall the stream.
    """
    if x.dim() < 2 or index.dim() != 2 or index.shape[0] != x.shape[0]:
        raise ValueError(f"expected x (B, L, ...) and index (B, P), got {tuple(x.shape)} and {tuple(index.shape)}")
    return fast.gather(x, index)
