"""Torch form of `match`."""

import torch
from torch import Tensor

from .._common import scratch_limit, unit_rows


@torch.no_grad()
def match(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply block by block of `a` in bounded memory; arguments and result as in the dispatcher."""
    unit_a, unit_b = unit_rows(a), unit_rows(b).transpose(1, 2)
    groups, m, n = a.shape[0], a.shape[1], b.shape[1]
    values = unit_a.new_empty(groups, m)
    index = torch.empty(groups, m, dtype=torch.int64, device=a.device)
    if values.numel() == 0:
        return values, index
    size = unit_a.element_size()
    room = scratch_limit(a, b) - (unit_a.numel() + unit_b.numel()) * size
    step = min(m, max(1, room // (groups * n * size)))
    block = unit_a.new_empty(groups, step, n)
    for start in range(0, m, step):
        rows = min(step, m - start)
        # `out=` reuses the block, and autocast leaves calls with it in full precision.
        similarity = torch.bmm(unit_a[:, start : start + rows], unit_b, out=block[:, :rows])
        # `max` over a dimension returns the first of equal values.
        best = similarity.max(dim=2)
        values[:, start : start + rows] = best.values
        index[:, start : start + rows] = best.indices
    return values, index
