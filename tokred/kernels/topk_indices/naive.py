"""Reference form of `topk_indices`."""

import math

import torch
from torch import Tensor


def topk_indices(scores: Tensor, k: int) -> Tensor:
    """Rank every row with Python's stable sort; arguments and result as in the dispatcher."""
    rows = scores.reshape(-1, scores.shape[-1]) if scores.numel() else scores.new_empty(0, 0)
    picked = []
    for row in rows.tolist():
        ranked = sorted(range(len(row)), key=lambda i: (math.isnan(row[i]), 0.0 if math.isnan(row[i]) else -row[i]))
        picked.append(ranked[:k])
    return torch.tensor(picked, dtype=torch.int64, device=scores.device).reshape(*scores.shape[:-1], k)
