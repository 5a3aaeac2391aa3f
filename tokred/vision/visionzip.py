"""VisionZip: keep what the CLS token looks at, and merge the rest into a few contextual tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import gather, match, topk_indices
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step


@dataclass(frozen=True)
class Zipped:
    """Dominant and contextual tokens of a group of images.

    Args:
        dominant: patches that the CLS token attends to most, in that order, (G, d).
        targets: patches that became contextual tokens, ascending, (G, c).
        rest: all patches that are not dominant, ascending, (G, N - d).
        assigned: for each of `rest` the contextual token that it joins, an index into `targets`, (G, N - d).
        contextual: hidden states of the contextual tokens, (G, c, D).
    """

    dominant: torch.Tensor
    targets: torch.Tensor
    rest: torch.Tensor
    assigned: torch.Tensor
    contextual: torch.Tensor


def zip_tokens(
    cls_row: torch.Tensor, hidden: torch.Tensor, keys: torch.Tensor, dominant: int, contextual: int
) -> Zipped:
    """Split the patches of each image into dominant and contextual tokens.

    Args:
        cls_row: attention of the CLS query over the patches, (G, heads, N).
        hidden: hidden states of the patches, (G, N, D).
        keys: head mean of their raw keys, (G, N, C).
        dominant: number of dominant patches, 0 to N.
        contextual: number of contextual tokens, 0 to N - dominant; 0 merges nothing.
    """
    groups, length, width = hidden.shape
    leading = topk_indices(cls_row.sum(1), dominant)
    is_rest = torch.ones((groups, length), dtype=torch.bool, device=hidden.device).scatter_(1, leading, False)
    rest = is_rest.nonzero()[:, 1].view(groups, length - dominant)
    if contextual == 0:
        none = rest[:, :0]
        return Zipped(leading, none, rest, none, hidden[:, :0])

    step = max(1, rest.shape[1] // contextual)
    place = torch.arange(contextual, device=hidden.device) * step
    targets = rest[:, place]
    unit_keys = gather(keys, rest)
    assigned = match(unit_keys, unit_keys[:, place])[1]
    is_target = torch.zeros(rest.shape[1], dtype=torch.bool, device=hidden.device)
    is_target[place] = True
    assigned = assigned.clone()
    assigned[:, place] = torch.arange(contextual, device=hidden.device)

    rest_hidden = gather(hidden, rest)
    joining = (~is_target).to(hidden.dtype).expand(groups, -1)
    sums = hidden.new_zeros(groups, contextual, width)
    sums.scatter_add_(1, assigned.unsqueeze(-1).expand(-1, -1, width), rest_hidden * joining.unsqueeze(-1))
    counts = hidden.new_zeros(groups, contextual).scatter_add_(1, assigned, joining).clamp(min=1)
    merged = rest_hidden[:, place] + sums / counts.unsqueeze(-1)
    return Zipped(leading, targets, rest, assigned, merged)


@dataclass(frozen=True, kw_only=True)
class VisionZip(BudgetMethod):
    """Keep the CLS token and the patches it attends to, and merge the others into contextual tokens.

    The CLS token has no place in the prompt: it takes the first place that no survivor needs. With a budget of two
    tokens nothing is merged, with one token the CLS token is left out too.

    Args:
        contextual_share: share of the budget given to contextual tokens, in [0, 1).
    """

    name: ClassVar[str] = "visionzip"
    source: ClassVar[str] = "VisionZip (arXiv 2412.04467), specs/vision.md section 5"
    scopes: ClassVar[tuple[str, ...]] = ("item",)
    contextual_share: float = 10 / 64

    def _validate(self) -> None:
        super()._validate()
        if not 0 <= self.contextual_share < 1:
            raise ParameterError(f"contextual_share={self.contextual_share!r} is not a share in [0, 1)")

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        needs = frozenset({Need.CLS_ROW, Need.TOWER_KEYS, Need.CLS_HIDDEN})
        return (Step(Stage.PROJECTOR, self._select, needs),)

    def split(self, total: int) -> tuple[int, int, int]:
        """Return how many CLS, dominant and contextual tokens make up a budget of `total` tokens."""
        with_cls = int(total >= 2)
        contextual = min(max(1, round(total * self.contextual_share)), total - 2) if total >= 3 else 0
        if self.contextual_share == 0:
            contextual = 0
        return with_cls, total - with_cls - contextual, contextual

    def _select(self, context: Context) -> Selection:
        hidden = context.hidden
        groups, length, _ = hidden.shape
        with_cls, dominant, contextual = self.split(self.count(length))
        cls_row, keys = context.observe(Need.CLS_ROW), context.observe(Need.TOWER_KEYS)
        zipped = zip_tokens(cls_row[..., 1:], hidden, keys[:, 1:], dominant, contextual)

        places = [zipped.dominant, zipped.targets]
        rows = [gather(hidden, zipped.dominant), zipped.contextual]
        if with_cls:
            taken = torch.zeros((groups, length), dtype=torch.int8, device=hidden.device)
            taken.scatter_(1, torch.cat(places, dim=1), 1)
            places.append(taken.argmin(dim=1, keepdim=True))
            rows.append(context.observe(Need.CLS_HIDDEN))
        keep, order = torch.cat(places, dim=1).sort(dim=-1)
        merged_into = torch.full((groups, length), -1, device=hidden.device)
        if contextual:
            merged_into.scatter_(1, zipped.rest, zipped.targets.gather(1, zipped.assigned))
            merged_into.scatter_(1, zipped.targets, -1)
        return Selection(keep, gather(torch.cat(rows, dim=1), order), merged_into)
