"""Reference form of `attention_columns`."""

import torch
from torch import Tensor


def attention_columns(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Hold all probabilities at once; arguments and result as in the dispatcher."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query.to(dtype) @ key.to(dtype).mT * scaling
    return logits.softmax(dim=-1).mean(dim=(1, 2))
