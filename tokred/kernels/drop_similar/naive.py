"""Reference form of `drop_similar`."""

import torch
from torch import Tensor

from .._common import unit_rows


def drop_similar(x: Tensor, order: Tensor, k: int, per_round: int) -> Tensor:
    """Follow the definition with Python lists; arguments and result as in the dispatcher."""
    out = torch.empty(x.shape[0], k, dtype=torch.int64, device=x.device)
    for g, rows in enumerate(order.tolist() if k else ()):
        unit = unit_rows(x[g])
        while len(rows) > k:
            first, second = rows[::2], rows[1::2]
            closest = {row: float((unit[second] @ unit[row]).max()) for row in first}
            ranked = sorted(first, key=lambda row: -closest[row])
            rows = ranked[min(per_round, len(rows) - k, len(first)) :] + second
        out[g] = torch.tensor(rows, device=x.device)
    return out
