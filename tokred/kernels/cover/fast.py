"""Torch form of `cover`."""

import torch
from torch import Tensor

from .._common import scratch_limit, unit_rows


@torch.no_grad()
def cover(x: Tensor, weight: Tensor, k: int) -> Tensor:
    """Compare all rows once if memory allows, else for every pick; arguments and result as in the dispatcher."""
    groups, n = weight.shape
    if k == 0 or groups == 0:
        return torch.empty(groups, k, dtype=torch.int64, device=x.device)
    unit = unit_rows(x)
    size = unit.element_size()
    room = scratch_limit(x) - unit.numel() * size
    # Beside the similarities stands what a pick adds to them.
    fitting = room // (n * n * 2 * size)
    step = n if fitting else max(1, room // (n * 2 * size))
    parts = zip(unit.split(max(1, fitting)), weight.to(unit.dtype).split(max(1, fitting)))
    return torch.cat([_pick(part, weights, k, step) for part, weights in parts])


def _pick(unit: Tensor, weight: Tensor, k: int, step: int) -> Tensor:
    """Pick among unit rows `(G, N, D)`, looking at the gains of `step` rows at a time."""
    groups, n = weight.shape
    turned = unit.transpose(1, 2)
    similarity, gains = unit.new_empty(groups, step, n), unit.new_empty(groups, step, n)
    # `out=` leaves the product in full precision under autocast.
    if step == n:
        torch.bmm(unit, turned, out=similarity)
    covered = unit.new_zeros(groups, 1, n)
    taken = torch.zeros((groups, n), dtype=torch.bool, device=unit.device)
    score = unit.new_empty(groups, n)
    samples = torch.arange(groups, device=unit.device)
    picks = torch.empty(groups, k, dtype=torch.int64, device=unit.device)
    latest = unit.new_empty(groups, 1, n)
    for turn in range(k):
        for start in range(0, n, step):
            rows = min(step, n - start)
            if step < n:
                torch.bmm(unit[:, start : start + rows], turned, out=similarity[:, :rows])
            added = torch.sub(similarity[:, :rows], covered, out=gains[:, :rows]).clamp_(min=0)
            torch.sum(added, dim=2, out=score[:, start : start + rows])
        pick = (score * weight).masked_fill_(taken, -torch.inf).argmax(dim=1)
        picks[:, turn] = pick
        taken[samples, pick] = True
        if step == n:
            latest = similarity[samples, pick].unsqueeze(1)
        else:
            torch.bmm(unit[samples, pick].unsqueeze(1), turned, out=latest)
        torch.maximum(covered, latest, out=covered)
    return picks
