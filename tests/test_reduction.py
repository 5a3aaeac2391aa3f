"""Reduction and layout against the plain Python that they stand for."""

import random

import pytest
import torch

from tokred.errors import UnsupportedInputError
from tokred.layout import MediaItem, place_items
from tokred.reduction import Reduction


def _random_kept(rng, batch, length):
    rows = [[rng.random() < 0.5 for _ in range(length)] for _ in range(batch)]
    for row in rows:
        row[rng.randrange(length)] = True
    return torch.tensor(rows)


def _reference(kept, fill_right):
    """Survivors of each row, filled up with -1 on the asked side."""
    rows = [row.nonzero()[:, 0].tolist() for row in kept]
    size = max(map(len, rows))
    filled = []
    for row, right in zip(rows, fill_right.tolist()):
        fill = [-1] * (size - len(row))
        filled.append(row + fill if right else fill + row)
    return filled


@pytest.mark.parametrize("seed", range(20))
def test_survivors_fill_gather_and_expand(seed):
    rng = random.Random(seed)
    batch, length = rng.randint(1, 4), rng.randint(1, 9)
    kept = _random_kept(rng, batch, length)
    fill_right = torch.tensor([rng.random() < 0.5 for _ in range(batch)])
    reduction = Reduction(kept, fill_right)
    expected = _reference(kept, fill_right)
    assert reduction.keep.tolist() == expected
    assert reduction.filled == any(-1 in row for row in expected)
    assert torch.equal(~reduction.dropped(), kept)

    x = torch.arange(batch * length * 2).view(batch, length, 2)
    gathered, expanded = reduction.gather(x), reduction.expand(reduction.gather(x))
    rows = torch.stack([x.transpose(0, 1)] * 3).transpose(1, 2)
    assert torch.equal(reduction.gather(rows, 2)[1], gathered)
    for sample, row in enumerate(expected):
        survivors = [token for token in row if token >= 0]
        for place, token in enumerate(row):
            assert gathered[sample, place].tolist() == x[sample, token if token >= 0 else survivors[0]].tolist()
        for token in range(length):
            before = [survivor for survivor in survivors if survivor <= token]
            nearest = before[-1] if before else survivors[0]
            assert expanded[sample, token].tolist() == x[sample, nearest].tolist()
        start = rng.randint(0, length)
        stop = rng.randint(start, length)
        first, last = reduction.interval(sample, start, stop)
        assert row[first:last] == [token for token in survivors if start <= token < stop]


@pytest.mark.parametrize("seed", range(20))
def test_two_reductions_in_a_row(seed):
    rng = random.Random(seed)
    batch, length = rng.randint(1, 4), rng.randint(2, 9)
    kept = _random_kept(rng, batch, length)
    first = Reduction(kept)
    # A later step never keeps a place that was filled.
    again = _random_kept(rng, batch, first.keep.shape[1]) & (first.keep >= 0)
    again[torch.arange(batch), (first.keep >= 0).int().argmax(1)] = True
    both = first.then(Reduction(again))
    survivors = [row[chosen].tolist() for row, chosen in zip(first.keep, again)]
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for sample, tokens in enumerate(survivors):
        mask[sample, tokens] = True
    direct = Reduction(mask)
    x = torch.arange(batch * length).view(batch, length)
    assert torch.equal(both.keep, direct.keep)
    assert both.filled == direct.filled
    assert torch.equal(both.expand(both.gather(x))[mask], x[mask])
    assert torch.equal(both.dropped(), direct.dropped())


def test_items_are_placed_in_order():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 0]]).bool()
    items = [MediaItem("image", length) for length in (2, 2, 2, 3)]
    spans = place_items({"image": mask}, {"image": items})
    assert [(span.sample, span.start, span.stop) for span in spans] == [(0, 1, 3), (0, 3, 5), (1, 0, 2), (1, 3, 6)]
    assert [span.item for span in spans] == items


def test_unknown_items_count_as_runs():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 1]]).bool()
    spans = place_items({"image": mask}, {})
    assert [(span.start, span.stop) for span in spans] == [(1, 5), (6, 7)]


def test_items_across_a_gap_are_refused():
    mask = torch.tensor([[1, 1, 0, 1, 1]]).bool()
    with pytest.raises(UnsupportedInputError, match="item of 3 image tokens"):
        place_items({"image": mask}, {"image": [MediaItem("image", 3), MediaItem("image", 1)]})
