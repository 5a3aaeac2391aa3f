"""Torch form of `drop_similar`."""

import torch
from torch import Tensor

from .._common import scratch_limit, unit_rows
from ..gather import gather
from ..match import match
from ..topk_indices import topk_indices


@torch.no_grad()
def drop_similar(x: Tensor, order: Tensor, k: int, per_round: int) -> Tensor:
    """Compare all rows once if memory allows, else in every round; arguments and result as in the dispatcher."""
    groups, m = order.shape
    if k in (0, m) or groups == 0:
        return order[:, :k].clone()
    unit = unit_rows(gather(x, order))
    size = unit.element_size()
    # A round takes a copy of the half of the similarities that it looks at.
    fitting = (scratch_limit(x) - unit.numel() * size) // (m * m * 2 * size)
    kept = [_thin(part, k, per_round, fitting > 0) for part in unit.split(max(1, fitting))]
    return order.gather(1, torch.cat(kept))


def _thin(unit: Tensor, k: int, per_round: int, whole: bool) -> Tensor:
    """Return the `k` rows that stay of unit rows `(G, M, D)`, int64 `(G, k)`; `whole` compares all of them at once."""
    groups, m = unit.shape[:2]
    # `out=` leaves the product in full precision under autocast.
    similarity = torch.bmm(unit, unit.transpose(1, 2), out=unit.new_empty(groups, m, m)) if whole else None
    left = torch.arange(m, device=unit.device).expand(groups, -1)
    while left.shape[1] > k:
        first, second = left[:, ::2], left[:, 1::2]
        gone = min(per_round, left.shape[1] - k, first.shape[1])
        if similarity is None:
            closest = match(gather(unit, first), gather(unit, second))[0]
        else:
            others = torch.ones((groups, m), dtype=torch.bool, device=unit.device).scatter_(1, second, False)
            closest = gather(similarity, first).masked_fill_(others.unsqueeze(1), -torch.inf).amax(dim=2)
        staying = topk_indices(closest, first.shape[1])[:, gone:]
        left = torch.cat([first.gather(1, staying), second], dim=1)
    return left
