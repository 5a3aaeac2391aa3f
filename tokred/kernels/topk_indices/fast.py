"""Torch form of `topk_indices`."""

import torch
from torch import Tensor

_SELECT_FROM = 2048
"""Row length from which a selection on unique keys beats a stable sort on CPU (sort: 0.15 ms, selection: 0.04 ms)."""

_SELECTABLE = (torch.float32, torch.bfloat16, torch.float16)


def topk_indices(scores: Tensor, k: int) -> Tensor:
    """Sort short rows, select in long ones; arguments and result as in the dispatcher."""
    n = scores.shape[-1]
    if not scores.is_cuda and n >= _SELECT_FROM and 2 * k <= n and scores.dtype in _SELECTABLE:
        return _select(scores, k)
    # Ascending order of the negated scores, because torch puts NaN last there and first in a descending sort.
    # Integers have no NaN but a most negative value without a negative: their complement reverses the order too.
    key = -scores if scores.is_floating_point() else ~scores
    return torch.sort(key, dim=-1, stable=True).indices[..., :k]


def _select(scores: Tensor, k: int) -> Tensor:
    """Use `torch.topk`, whose order among ties is unspecified, on integer keys that cannot tie.

    The upper half of a key is the score's bit pattern, made monotone, and the lower half the index counted downwards.
    """
    n = scores.shape[-1]
    scores = scores.detach().float() + 0.0  # -0.0 becomes +0.0: equal scores need equal bits
    bits = scores.view(torch.int32)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = rank.masked_fill_(scores.isnan(), torch.iinfo(torch.int32).min)
    key = (rank.long() << 32) | torch.arange(n - 1, -1, -1, device=scores.device)
    return key.topk(k, dim=-1).indices
