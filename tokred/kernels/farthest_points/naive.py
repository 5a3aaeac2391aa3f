"""Reference form of `farthest_points`."""

import torch
from torch import Tensor

from .._common import unit_rows


def farthest_points(x: Tensor, k: int, mask_selected: bool = True) -> Tensor:
    """Evaluate the definition anew for every pick; arguments and result as in the dispatcher."""
    groups = x.shape[0]
    out = torch.empty(groups, k, dtype=torch.int64, device=x.device)
    if k == 0:
        return out
    for g in range(groups):
        unit = unit_rows(x[g])
        distance = 1 - unit @ unit.T
        others = distance.clone().fill_diagonal_(float("inf"))
        picked = [int(others.amin(dim=0).argmax())]
        while len(picked) < k:
            nearest = distance[picked].amin(dim=0)
            if mask_selected:
                nearest[picked] = -float("inf")
            picked.append(int(nearest.argmax()))
        out[g] = torch.tensor(picked, device=x.device)
    return out
