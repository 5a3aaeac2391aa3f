"""Pieces that several operations use."""

import torch
from torch import Tensor

SCRATCH_BYTES = 64 * 2**20
"""Scratch memory that any operation may use; one with large inputs may use four times their size instead."""


def scratch_limit(*inputs: Tensor) -> int:
    """Return how many bytes of scratch memory an operation on `inputs` may hold.

    Args:
        inputs: tensors of any shape and dtype.

    Returns:
        `max(64 MiB, 4 * size of the inputs)`.
    """
    return max(SCRATCH_BYTES, 4 * sum(x.numel() * x.element_size() for x in inputs))


def unit_rows(x: Tensor) -> Tensor:
    """Scale every row to length 1.

    The division has no epsilon, so rows of any tiny length are exact. A zero row has no direction and stays zero, which
    makes its cosine with everything 0; a plain division would turn it into NaN, and NaN wins every later maximum.

    Args:
        x: `(..., D)`, floating point.

    Returns:
        `(..., D)`, float32, or float64 if `x` is. Half-precision cosines tie too often to rank by.
    """
    if x.dtype != torch.float64:
        x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill_(norm == 0, 1.0)
