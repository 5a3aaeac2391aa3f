"""Reference form of `gather`."""

from torch import Tensor


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Copy row by row; arguments and result as in the dispatcher."""
    out = x.new_empty(index.shape + x.shape[2:])
    for b in range(index.shape[0]):
        for p in range(index.shape[1]):
            row = int(index[b, p])
            if not 0 <= row < x.shape[1]:
                raise IndexError(f"index {row} of sample {b} is outside [0, {x.shape[1]})")
            out[b, p] = x[b, row]
    return out
