"""Reference form of `cover`."""

import torch
from torch import Tensor

from .._common import unit_rows


def cover(x: Tensor, weight: Tensor, k: int) -> Tensor:
    """Evaluate the definition anew for every pick; arguments and result as in the dispatcher."""
    out = torch.empty(x.shape[0], k, dtype=torch.int64, device=x.device)
    for g in range(x.shape[0]):
        unit = unit_rows(x[g])
        similarity = unit @ unit.T
        picked: list[int] = []
        while len(picked) < k:
            covered = similarity[picked].amax(dim=0).clamp(min=0) if picked else torch.zeros_like(similarity[0])
            with_each = torch.maximum(similarity, covered)
            score = (with_each - covered).sum(dim=1) * weight[g].to(unit.dtype)
            score[picked] = -torch.inf
            picked.append(int(score.argmax()))
        out[g] = torch.tensor(picked, device=x.device)
    return out
