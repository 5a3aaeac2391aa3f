"""Torch form of `attention_columns`."""

import torch
from torch import Tensor

from .._common import scratch_limit


@torch.no_grad()
def attention_columns(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Sum up block by block of queries in bounded memory; arguments and result as in the dispatcher."""
    groups, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # The heads that share keys stand below each other, so that one product serves them.
    query = query.reshape(groups * kv_heads, -1, width).to(dtype)
    key = (key.to(dtype) * scaling).reshape(groups * kv_heads, keys, width).transpose(1, 2)
    total = key.new_zeros(groups * kv_heads, keys)
    # Logits, probabilities and a block's sum are held at a time.
    room = scratch_limit(query, key) // (3 * key.element_size())
    step = min(query.shape[1], max(1, room // max(1, groups * kv_heads * keys)))
    for start in range(0, query.shape[1], step):
        # `out=` leaves the product in full precision under autocast.
        part = query[:, start : start + step]
        logits = torch.bmm(part, key, out=key.new_empty(part.shape[0], part.shape[1], keys))
        total += logits.softmax(dim=-1).sum(dim=1)
    return total.view(groups, kv_heads, keys).sum(dim=1) / (heads * queries)
