import pytest
import torch

from tokred.kernels import farthest_points
from tokred.kernels.farthest_points import fast, naive

SHAPES = [(1, 1, 4), (1, 2, 3), (1, 37, 16), (4, 23, 8), (1, 500, 24), (2, 401, 24)]
ROUTES = {"matrix": None, "groups apart": 1.5, "rows": 0.25}
"""Scratch memory as a multiple of one group's distances: all at once, group by group, no matrix at all."""


def _limit(monkeypatch, x: torch.Tensor, share: float | None) -> None:
    size = max(4, x.element_size())
    if share is not None:
        limit = x.numel() * size + int(share * x.shape[1] ** 2 * size)
        monkeypatch.setattr(fast, "scratch_limit", lambda *_: limit)


def _check_greedy(x: torch.Tensor, picks: torch.Tensor) -> None:
    """Every pick is the best one up to rounding: float32 leaves near-ties open, so another form may order them anew."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    for distance, row in zip(1 - unit @ unit.mT, picks.tolist(), strict=True):
        nearest = distance.clone().fill_diagonal_(2.0).amin(0)
        for pick in row:
            assert nearest[pick] >= nearest.max() - 1e-5
            nearest = distance[row[: row.index(pick) + 1]].amin(0)
            nearest[row[: row.index(pick) + 1]] = -1.0


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_reference(shape, dtype, route, device, generator, monkeypatch):
    x = torch.randn(shape, generator=generator).to(dtype).to(device)
    _limit(monkeypatch, x, ROUTES[route])
    n = shape[1]
    for k in sorted({0, 1, n // 4, n}):
        got = farthest_points(x, k)
        assert got.dtype == torch.int64
        assert got.shape == (shape[0], k)
        if dtype == torch.float64:
            assert torch.equal(got, naive.farthest_points(x, k)), k
        else:
            _check_greedy(x, got)
        assert all(len(set(row)) == k for row in got.tolist())


def _axes(order: list[int], device: str) -> torch.Tensor:
    """Unit vectors: every distance is exactly 0 or 1, so ties are exact."""
    return torch.eye(8, device=device)[order].unsqueeze(0)


@pytest.mark.parametrize("route", ROUTES)
def test_ties_go_to_the_lowest_index(route, device, monkeypatch):
    x = _axes([5, 5, 3, 1, 3, 0], device)
    _limit(monkeypatch, x, ROUTES[route])
    # Rows 3 and 5 have no double and lie at distance 1 from everything; then 0 and 2; then only doubles are left.
    assert farthest_points(x, 6).tolist() == [[3, 0, 2, 5, 1, 4]]
    assert naive.farthest_points(x, 6).tolist() == [[3, 0, 2, 5, 1, 4]]


@pytest.mark.parametrize("route", ROUTES)
def test_released_code_repeats_rows(route, device, monkeypatch):
    x = _axes([5, 5, 3, 1, 3, 0], device)
    _limit(monkeypatch, x, ROUTES[route])
    # All six minima are 0 after four picks, and nothing excludes row 0.
    assert farthest_points(x, 6, mask_selected=False).tolist() == [[3, 0, 2, 5, 0, 0]]
    assert naive.farthest_points(x, 6, mask_selected=False).tolist() == [[3, 0, 2, 5, 0, 0]]


@pytest.mark.parametrize("route", ROUTES)
def test_first_pick_is_the_most_isolated_row(route, device, monkeypatch):
    angles = torch.tensor([0.0, 0.1, 0.5, 0.6, 1.4, 0.65], device=device)
    x = torch.stack([angles.cos(), angles.sin()], dim=-1).unsqueeze(0)
    _limit(monkeypatch, x, ROUTES[route])
    assert farthest_points(x, 3).tolist() == [[4, 0, 5]]


def test_groups_do_not_mix(device, generator):
    x = torch.randn(5, 30, 16, generator=generator).to(device)
    alone = torch.cat([farthest_points(x[g : g + 1], 10) for g in range(5)])
    assert torch.equal(farthest_points(x, 10), alone)


@pytest.mark.parametrize("route", ROUTES)
def test_zero_rows_are_legal(route, device, generator, monkeypatch):
    x = torch.randn(1, 12, 16, generator=generator).to(device)
    x[0, [2, 7]] = 0
    _limit(monkeypatch, x, ROUTES[route])
    assert sorted(farthest_points(x, 12)[0].tolist()) == list(range(12))


def test_input_is_left_alone(device, generator):
    x = torch.randn(2, 20, 8, generator=generator).to(device).requires_grad_()
    before = x.detach().clone()
    assert not farthest_points(x, 5).requires_grad
    assert torch.equal(x, before)


def test_autocast_changes_nothing(device, generator):
    x = torch.randn(1, 60, 32, generator=generator).to(device)
    expected = farthest_points(x, 20)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(farthest_points(x, 20), expected)


@pytest.mark.parametrize("k", [-1, 6])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(ValueError, match=rf"\[0, 5\].*got {k}"):
        farthest_points(torch.ones(1, 5, 2), k)


def test_shape_is_checked():
    with pytest.raises(ValueError, match="expected x"):
        farthest_points(torch.ones(5, 2), 1)


def test_no_groups(device):
    assert farthest_points(torch.empty(0, 5, 2, device=device), 3).shape == (0, 3)
