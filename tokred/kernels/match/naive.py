"""Reference form of `match`."""

from torch import Tensor

from .._common import unit_rows


def match(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Compare all pairs at once; arguments and result as in the dispatcher."""
    similarity = unit_rows(a) @ unit_rows(b).transpose(1, 2)
    if similarity.numel() == 0:
        return similarity.new_empty(a.shape[:2]), similarity.new_empty(a.shape[:2]).long()
    values = similarity.amax(dim=2)
    return values, (similarity == values.unsqueeze(2)).int().argmax(dim=2)
