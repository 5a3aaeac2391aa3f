"""Torch form of `nearest`."""

import torch
from torch import Tensor

from .._common import scratch_limit, unit_rows
from ..topk_indices import topk_indices


@torch.no_grad()
def nearest(a: Tensor, b: Tensor, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Multiply block by block of `a` in bounded memory; arguments and result as in the dispatcher."""
    unit_a, unit_b = unit_rows(a), unit_rows(b).transpose(1, 2)
    groups, m, n = a.shape[0], a.shape[1], b.shape[1]
    values = unit_a.new_empty(groups, m, k)
    index = torch.empty(groups, m, k, dtype=torch.int64, device=a.device)
    if values.numel() == 0:
        return values, index
    size = unit_a.element_size()
    room = scratch_limit(a, b) - (unit_a.numel() + unit_b.numel()) * size
    # Ranking takes a negated copy of the block, the same sorted, and its indices.
    step = min(m, max(1, room // (groups * n * (3 * size + 8))))
    block = unit_a.new_empty(groups, step, n)
    for start in range(0, m, step):
        rows = min(step, m - start)
        # `out=` reuses the block, and autocast leaves calls with it in full precision.
        similarity = torch.bmm(unit_a[:, start : start + rows], unit_b, out=block[:, :rows])
        if exclude is not None:
            similarity.scatter_(2, exclude[:, start : start + rows].unsqueeze(2), -torch.inf)
        best = topk_indices(similarity, k)
        values[:, start : start + rows] = similarity.gather(2, best)
        index[:, start : start + rows] = best
    return values, index
