"""Torch form of `gather`.

`torch.gather` with an expanded index looks every single element up: 144 of 576 rows of width 1024 take it 0.33 ms,
`index_select` 0.02 ms.
"""

import torch
from torch import Tensor


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Select in one call; arguments and result as in the dispatcher."""
    batch, length = x.shape[:2]
    if index.numel() == 0:
        return x.new_empty(index.shape + x.shape[2:])
    if not x.is_cuda:
        # In flattened samples an index that is too large would silently read the next sample.
        low, high = torch.aminmax(index)
        if low < 0 or high >= length:
            raise IndexError(f"index must lie in [0, {length}), got values from {int(low)} to {int(high)}")
    if batch == 1:
        return x.index_select(1, index[0])
    sample = torch.arange(batch, device=index.device).unsqueeze(1)
    if not x.is_contiguous():
        return x[sample, index]  # flattening would copy all of x
    return x.flatten(0, 1).index_select(0, (sample * length + index).flatten()).unflatten(0, index.shape)
