"""Torch form of `farthest_points`.

The smallest distance of every row to the picks so far is kept and lowered after each pick, so a pick costs one row of
distances. Setting the distance of a row to itself to `-inf` makes that same update exclude it: no masking step.
"""

import torch
from torch import Tensor

from .._common import scratch_limit, unit_rows

_STRIPES = 6
"""The matrix of a long row set is built in so many stripes; more would be too thin to multiply efficiently."""

_STRIPES_FROM = 384
"""Row count from which the half of the product that stripes save outweighs the copies that they need (CPU)."""


@torch.no_grad()
def farthest_points(x: Tensor, k: int, mask_selected: bool = True) -> Tensor:
    """Use the whole distance matrix if memory allows; arguments and result as in the dispatcher."""
    groups, n = x.shape[:2]
    if k == 0 or groups == 0:
        return torch.empty(groups, k, dtype=torch.int64, device=x.device)
    unit = unit_rows(x)
    size = unit.element_size()
    room = scratch_limit(x) - unit.numel() * size
    fitting = room // (n * n * size)
    if fitting == 0:
        return torch.stack([_pick_by_rows(u, k, mask_selected, max(1, room // (n * size))) for u in unit])
    picks = [_pick_by_matrix(_distances(u), k, mask_selected) for u in unit.split(fitting)]
    return picks[0] if len(picks) == 1 else torch.cat(picks)


def _distances(unit: Tensor) -> Tensor:
    """Return `1 - cosine` of all pairs, `(G, N, N)` for `(G, N, D)`."""
    groups, n = unit.shape[:2]
    step = n if unit.is_cuda or n < _STRIPES_FROM else -(-n // _STRIPES)
    # `out=` leaves the product in full precision under autocast.
    out = unit.new_empty(groups, n, n)
    for start in range(0, n, step):
        # The product is symmetric: the part above a diagonal block is a copy of the part left of it.
        stop = min(n, start + step)
        torch.bmm(unit[:, start:], unit[:, start:stop].transpose(1, 2), out=out[:, start:, start:stop])
        if stop < n:
            out[:, start:stop, stop:] = out[:, stop:, start:stop].transpose(1, 2)
    return torch.sub(unit.new_ones(()), out, out=out)


def _pick_by_matrix(distance: Tensor, k: int, mask_selected: bool) -> Tensor:
    """Pick with all distances `(G, N, N)` at hand; overwrites their diagonal."""
    groups, n = distance.shape[:2]
    diagonal = distance.diagonal(dim1=1, dim2=2)
    to_itself = None if mask_selected else diagonal.clone()
    diagonal.fill_(float("inf"))
    first = distance.amin(dim=2).argmax(dim=1)
    if to_itself is None:
        diagonal.fill_(-float("inf"))
    else:
        diagonal.copy_(to_itself)
    if groups == 1 and not distance.is_cuda:
        return _pick_on_host(distance[0], int(first), k).unsqueeze(0)
    picks = torch.empty(k, groups, dtype=torch.int64, device=distance.device)
    picks[0] = first
    columns = picks.unbind(0)
    rows = distance.view(groups * n, n)
    start = torch.arange(0, groups * n, n, device=distance.device)
    nearest = rows.index_select(0, start + first)
    latest, flat = torch.empty_like(nearest), torch.empty_like(start)
    for pick in columns[1:]:
        torch.argmax(nearest, 1, out=pick)
        torch.add(start, pick, out=flat)
        torch.index_select(rows, 0, flat, out=latest)
        torch.minimum(nearest, latest, out=nearest)
    return picks.T.contiguous()


def _pick_on_host(distance: Tensor, first: int, k: int) -> Tensor:
    """Pick in one group on CPU, where a Python integer indexes faster than a tensor; `distance` is `(N, N)`."""
    picks = [first]
    nearest = distance[first].clone()
    for _ in range(k - 1):
        pick = int(nearest.argmax())
        picks.append(pick)
        torch.minimum(nearest, distance[pick], out=nearest)
    return torch.tensor(picks)


def _pick_by_rows(unit: Tensor, k: int, mask_selected: bool, step: int) -> Tensor:
    """Pick in one group `(N, D)` whose distances do not fit: `step` rows of them for the first pick, then one each."""
    n = unit.shape[0]
    isolation = unit.new_empty(n)
    block = unit.new_empty(min(step, n), n)
    for start in range(0, n, step):
        stop = min(n, start + step)
        similarity = torch.mm(unit[start:stop], unit.T, out=block[: stop - start])
        similarity.diagonal(offset=start).fill_(-float("inf"))
        isolation[start:stop] = similarity.amax(dim=1)
    del block
    isolation = 1 - isolation
    picks = torch.empty(k, dtype=torch.int64, device=unit.device)
    slots = picks.split(1)
    torch.argmax(isolation, 0, keepdim=True, out=slots[0])
    nearest = torch.full_like(isolation, float("inf"))
    one, latest, row = unit.new_ones(()), torch.empty_like(isolation), unit.new_empty(1, unit.shape[1])
    for t, pick in enumerate(slots):
        if t > 0:
            torch.argmax(nearest, 0, keepdim=True, out=pick)
        torch.index_select(unit, 0, pick, out=row)
        torch.mv(unit, row[0], out=latest)
        torch.sub(one, latest, out=latest)
        if mask_selected:
            latest.index_fill_(0, pick, -float("inf"))
        torch.minimum(nearest, latest, out=nearest)
    return picks
