"""Reference form of `nearest`."""

import torch
from torch import Tensor

from .._common import unit_rows
from ..topk_indices import naive as topk


def nearest(a: Tensor, b: Tensor, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compare all pairs at once; arguments and result as in the dispatcher."""
    similarity = unit_rows(a) @ unit_rows(b).transpose(1, 2)
    if exclude is not None:
        columns = torch.arange(b.shape[1], device=b.device)
        similarity = similarity.masked_fill(columns == exclude.unsqueeze(2), -torch.inf)
    index = topk.topk_indices(similarity, k)
    return similarity.gather(2, index), index
