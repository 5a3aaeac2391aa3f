import pytest
import torch

from tokred.kernels import cover
from tokred.kernels.cover import fast, naive

ROUTES = {"matrix": None, "groups apart": 1.5, "rows": 0.1}
"""Scratch memory as a multiple of what one group's similarities take: all at once, group by group, in blocks."""


def _limit(monkeypatch, x, share):
    if share is not None:
        size = max(4, x.element_size())
        limit = x.numel() * size + int(share * x.shape[1] ** 2 * 2 * size)
        monkeypatch.setattr(fast, "scratch_limit", lambda *_: limit)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 2, 3), (3, 37, 8), (2, 60, 16)], ids=str)
def test_every_pick_is_the_best(shape, dtype, route, device, generator, monkeypatch):
    x = torch.randn(shape, generator=generator).to(dtype).to(device)
    weight = torch.rand(shape[:2], generator=generator).to(device)
    _limit(monkeypatch, x, ROUTES[route])
    n = shape[1]
    for k in sorted({0, 1, n // 4, n}):
        got = cover(x, weight, k)
        assert got.dtype == torch.int64
        assert got.shape == (shape[0], k)
        assert all(len(set(row)) == k for row in got.tolist())
        if dtype == torch.float64:
            assert torch.equal(got, naive.cover(x, weight, k)), k
        else:
            _check_greedy(x, weight, got)


def _check_greedy(x, weight, picks):
    """Float32 leaves near-ties open, so that another order of summation may pick another one of them."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    for similarity, row_weight, row in zip(unit @ unit.mT, weight.double(), picks.tolist(), strict=True):
        covered = torch.zeros_like(row_weight)
        for turn, pick in enumerate(row):
            score = (similarity - covered.unsqueeze(1)).clamp(min=0).sum(0) * row_weight
            score[row[:turn]] = -1.0
            assert score[pick] >= score.max() - 1e-4
            covered = torch.maximum(covered, similarity[pick])


@pytest.mark.parametrize("route", ROUTES)
def test_a_heavy_row_and_then_what_it_does_not_cover(route, device, monkeypatch):
    """
    Rows 0, 1 and 2 are one direction, 3 and 4 another, 5 a third. First scores: 3 * 1, 3 * 1, 3 * 2, 2 * 2, 2 * 2 and
    1 * 5: row 2. Then only 3, 4 and 5 cover anything new: 2 * 2, 2 * 2 and 1 * 5: row 5, then the first of 3 and 4.
    Nothing is left to cover after that: the lowest rows.
    """
    x = torch.eye(3, device=device)[[0, 0, 0, 1, 1, 2]].unsqueeze(0)
    weight = torch.tensor([[1.0, 1, 2, 2, 2, 5]], device=device)
    _limit(monkeypatch, x, ROUTES[route])
    assert cover(x, weight, 6).tolist() == [[2, 5, 3, 0, 1, 4]]
    assert naive.cover(x, weight, 6).tolist() == [[2, 5, 3, 0, 1, 4]]


@pytest.mark.parametrize("route", ROUTES)
def test_opposite_rows_cover_nothing(route, device, monkeypatch):
    """Cosines with row 1 are -1 and 1: below zero counts as zero, so that each row covers itself alone."""
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], device=device)
    _limit(monkeypatch, x, ROUTES[route])
    assert cover(x, torch.tensor([[1.0, 1.5]], device=device), 1).tolist() == [[1]]


def test_groups_do_not_mix(device, generator):
    x = torch.randn(5, 30, 16, generator=generator).to(device)
    weight = torch.rand(5, 30, generator=generator).to(device)
    alone = torch.cat([cover(x[g : g + 1], weight[g : g + 1], 10) for g in range(5)])
    assert torch.equal(cover(x, weight, 10), alone)


@pytest.mark.parametrize("route", ROUTES)
def test_zero_rows_are_legal(route, device, generator, monkeypatch):
    x = torch.randn(1, 12, 16, generator=generator).to(device)
    x[0, [2, 7]] = 0
    _limit(monkeypatch, x, ROUTES[route])
    assert sorted(cover(x, torch.ones(1, 12, device=device), 12)[0].tolist()) == list(range(12))


def test_input_is_left_alone(device, generator):
    x = torch.randn(2, 20, 8, generator=generator).to(device).requires_grad_()
    weight = torch.rand(2, 20, generator=generator).to(device)
    before = x.detach().clone(), weight.clone()
    assert not cover(x, weight, 5).requires_grad
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_autocast_changes_nothing(device, generator):
    x = torch.randn(1, 60, 32, generator=generator).to(device)
    weight = torch.rand(1, 60, generator=generator).to(device)
    expected = cover(x, weight, 20)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(cover(x, weight, 20), expected)


def test_no_groups(device):
    assert cover(torch.empty(0, 5, 2, device=device), torch.empty(0, 5, device=device), 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "weight", "k", "message"),
    [
        ((5, 2), (1, 5), 1, "expected x"),
        ((1, 5, 2), (1, 4), 1, "expected x"),
        ((1, 5, 2), (1, 5), 6, r"\[0, 5\].*got 6"),
        ((1, 5, 2), (1, 5), -1, r"\[0, 5\].*got -1"),
    ],
)
def test_bad_arguments_are_refused(x, weight, k, message):
    with pytest.raises(ValueError, match=message):
        cover(torch.ones(x), torch.ones(weight), k)
