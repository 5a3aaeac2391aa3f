import pytest
import torch

from tokred.kernels import drop_similar
from tokred.kernels.drop_similar import fast, naive

ROUTES = {"matrix": None, "groups apart": 1.5, "rows": 0.25}
"""Scratch memory as a multiple of one group's similarities: all at once, group by group, no matrix at all."""


def _limit(monkeypatch, x, share):
    if share is not None:
        size = max(4, x.element_size())
        limit = x.numel() * size + int(share * x.shape[1] ** 2 * 2 * size)
        monkeypatch.setattr(fast, "scratch_limit", lambda *_: limit)


def _order(groups, n, m, generator):
    return torch.stack([torch.randperm(n, generator=generator)[:m] for _ in range(groups)])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (1, 2, 2, 3), (3, 37, 37, 8), (2, 60, 41, 16)], ids=str)
@pytest.mark.parametrize("per_round", [1, 3, 8, 1000])
def test_same_as_reference(shape, dtype, per_round, route, device, generator, monkeypatch):
    groups, n, m, width = shape
    x = torch.randn(groups, n, width, generator=generator).to(dtype).to(device)
    order = _order(groups, n, m, generator).to(device)
    _limit(monkeypatch, x[:, :m], ROUTES[route])
    for k in sorted({0, 1, m // 4, m}):
        got = drop_similar(x, order, k, per_round)
        assert got.dtype == torch.int64
        assert got.shape == (groups, k)
        assert torch.equal(got, naive.drop_similar(x, order, k, per_round))


@pytest.mark.parametrize("route", ROUTES)
def test_what_resembles_the_other_half_goes_first(route, device, monkeypatch):
    """Halves (0, 2, 4) and (1, 3), all but 2 and 3 at right angles to the other half: row 2 is the double of row 3."""
    x = torch.eye(5, device=device)[[0, 1, 3, 3, 4]].unsqueeze(0)
    _limit(monkeypatch, x, ROUTES[route])
    order = torch.arange(5, device=device).unsqueeze(0)
    assert drop_similar(x, order, 4, 8).tolist() == [[0, 4, 1, 3]]


@pytest.mark.parametrize("route", ROUTES)
def test_rounds_deal_anew(route, device, monkeypatch):
    """
    Cosines with the other half are exact, 0, 0.6, 0.8 or 1. Round 1: halves (0, 2) and (1, 3), row 2 equals row 3 and
    goes. Round 2: halves (0, 3) and (1,), row 0 has 0.6 and row 3 has 0.8, so row 3 goes although row 0 came first.
    """
    x = torch.tensor([[[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]], device=device)
    _limit(monkeypatch, x, ROUTES[route])
    order = torch.arange(4, device=device).unsqueeze(0)
    assert drop_similar(x, order, 3, 1).tolist() == [[0, 1, 3]]
    assert drop_similar(x, order, 2, 1).tolist() == [[0, 1]]


@pytest.mark.parametrize("route", ROUTES)
def test_ties_drop_the_first_in_order(route, device, monkeypatch):
    x = torch.ones(1, 6, 2, device=device)
    _limit(monkeypatch, x, ROUTES[route])
    order = torch.tensor([[5, 0, 3, 1, 2, 4]], device=device)
    assert drop_similar(x, order, 5, 8).tolist() == [[3, 2, 0, 1, 4]]


def test_a_round_drops_no_more_than_one_half(device):
    """Of two rows one may go in a round, of four two; with room for eight it still takes two rounds to one."""
    x = torch.eye(4, device=device).unsqueeze(0)
    order = torch.arange(4, device=device).unsqueeze(0)
    assert drop_similar(x, order, 1, 8).tolist() == [[3]]


def test_groups_do_not_mix(device, generator):
    x = torch.randn(5, 30, 16, generator=generator).to(device)
    order = _order(5, 30, 30, generator).to(device)
    alone = torch.cat([drop_similar(x[g : g + 1], order[g : g + 1], 10, 4) for g in range(5)])
    assert torch.equal(drop_similar(x, order, 10, 4), alone)


@pytest.mark.parametrize("route", ROUTES)
def test_zero_rows_are_like_nothing(route, device, monkeypatch):
    x = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]], device=device)
    _limit(monkeypatch, x, ROUTES[route])
    assert drop_similar(x, torch.tensor([[0, 1, 2]], device=device), 2, 8).tolist() == [[0, 1]]


@pytest.mark.parametrize("route", ROUTES)
def test_half_precision_is_compared_in_full(route, device, monkeypatch):
    # In bfloat16 both cosines with the last row round to 1 and the first row would go.
    rows = [[1.0, 0.0625], [1.0, 0.0], [1.0, 0.03125]]
    x = torch.tensor([rows], dtype=torch.bfloat16, device=device)
    _limit(monkeypatch, x, ROUTES[route])
    assert drop_similar(x, torch.tensor([[0, 1, 2]], device=device), 2, 1).tolist() == [[0, 1]]


@pytest.mark.parametrize("route", ROUTES)
def test_autocast_changes_nothing(route, device, generator, monkeypatch):
    x = torch.randn(1, 60, 32, generator=generator).to(device)
    order = torch.arange(60, device=device).unsqueeze(0)
    _limit(monkeypatch, x, ROUTES[route])
    expected = drop_similar(x, order, 20, 4)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(drop_similar(x, order, 20, 4), expected)


def test_no_groups(device):
    order = torch.empty(0, 5, dtype=torch.long, device=device)
    assert drop_similar(torch.empty(0, 5, 2, device=device), order, 3, 8).shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "order", "k", "per_round", "message"),
    [
        ((5, 2), (1, 5), 1, 8, "expected x"),
        ((1, 5, 2), (2, 5), 1, 8, "expected x"),
        ((1, 5, 2), (1, 4), 5, 8, r"\[0, 4\].*got 5"),
        ((1, 5, 2), (1, 4), -1, 8, r"\[0, 4\].*got -1"),
        ((1, 5, 2), (1, 4), 1, 0, "per_round"),
    ],
)
def test_bad_arguments_are_refused(x, order, k, per_round, message):
    with pytest.raises(ValueError, match=message):
        drop_similar(torch.ones(x), torch.zeros(order, dtype=torch.long), k, per_round)
