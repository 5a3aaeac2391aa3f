"""Maths that several methods share."""

import torch


def attention_score(rows: torch.Tensor) -> torch.Tensor:
    """Return the head mean of attention rows.

    Args:
        rows: attention probabilities of one query per group, (G, heads, N).

    Returns:
        (G, N), in the dtype of the rows.
    """
    return rows.mean(dim=1)
