import pytest
import torch

from tokred.kernels import match, nearest
from tokred.kernels.nearest import fast, naive


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2, 4), (1, 7, 5, 8), (3, 6, 11, 16), (2, 33, 3, 3), (2, 65, 70, 20)], ids=str)
@pytest.mark.parametrize("blocked", [False, True], ids=["one block", "blocks"])
@pytest.mark.parametrize("excluding", [False, True])
def test_same_as_reference(shape, dtype, blocked, excluding, device, generator, monkeypatch):
    groups, m, n, width = shape
    a = torch.randn(groups, m, width, generator=generator).to(dtype).to(device)
    b = torch.randn(groups, n, width, generator=generator).to(dtype).to(device)
    exclude = torch.randint(n, (groups, m), generator=generator).to(device) if excluding else None
    if blocked:
        inputs = (a.numel() + b.numel()) * max(4, a.element_size())
        monkeypatch.setattr(fast, "scratch_limit", lambda *_: inputs + groups * n * 8 * 5)
    for k in sorted({0, 1, (n - 1) // 2, n - 1}):
        values, index = nearest(a, b, k, exclude)
        expected_values, expected_index = naive.nearest(a, b, k, exclude)
        assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert index.dtype == torch.int64
        torch.testing.assert_close(values, expected_values)
        assert torch.equal(index, expected_index)


def test_the_nearest_one_is_the_match(device, generator):
    a, b = (torch.randn(2, n, 8, generator=generator).to(device) for n in (5, 9))
    values, index = nearest(a, b, 1)
    expected_values, expected_index = match(a, b)
    torch.testing.assert_close(values[..., 0], expected_values)
    assert torch.equal(index[..., 0], expected_index)


def test_equal_similarities_give_the_lowest_rows(device):
    # Axis-parallel rows: all products are exact, whatever the order of summation.
    b = torch.eye(4, device=device)[[3, 1, 2, 1, 2, 1]].unsqueeze(0)
    a = torch.eye(4, device=device)[[1, 0]].unsqueeze(0)
    values, index = nearest(a, b, 4)
    assert index.tolist() == [[[1, 3, 5, 0], [0, 1, 2, 3]]]
    assert values.tolist() == [[[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]


def test_a_row_is_not_its_own_neighbour(device):
    x = torch.eye(3, device=device)[[0, 0, 1]].unsqueeze(0)
    itself = torch.arange(3, device=device).unsqueeze(0)
    assert nearest(x, x, 2, itself)[1].tolist() == [[[1, 2], [0, 2], [0, 1]]]


def test_zero_row_has_no_direction(device):
    a = torch.tensor([[[0.0, 0.0], [-1.0, 0.1]]], device=device)
    b = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], device=device)
    assert nearest(a, b, 2)[1].tolist() == [[[0, 1], [1, 0]]]


def test_half_precision_is_compared_in_full(device):
    # In bfloat16 both cosines round to 1 and the first row would win.
    b = torch.tensor([[[1.0, 0.0625], [1.0, 0.03125]]], dtype=torch.bfloat16, device=device)
    a = torch.tensor([[[1.0, 0.0]]], dtype=torch.bfloat16, device=device)
    assert nearest(a, b, 1)[1].tolist() == [[[1]]]


def test_autocast_changes_nothing(device, generator):
    a, b = (torch.randn(1, n, 32, generator=generator).to(device) for n in (20, 30))
    expected = nearest(a, b, 5)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = nearest(a, b, 5)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_nothing_to_compare(device):
    assert nearest(torch.empty(2, 0, 3, device=device), torch.ones(2, 4, 3, device=device), 2)[1].shape == (2, 0, 2)
    assert nearest(torch.empty(0, 5, 3, device=device), torch.empty(0, 4, 3, device=device), 2)[1].shape == (0, 5, 2)
    assert nearest(torch.ones(1, 2, 3, device=device), torch.empty(1, 0, 3, device=device), 0)[1].shape == (1, 2, 0)


@pytest.mark.parametrize(
    ("a", "b", "k", "exclude", "message"),
    [
        ((2, 3, 4), (1, 3, 4), 1, None, "expected a"),
        ((2, 3, 4), (2, 3, 5), 1, None, "expected a"),
        ((3, 4), (3, 4), 1, None, "expected a"),
        ((1, 3, 4), (1, 2, 4), 3, None, r"\[0, 2\]"),
        ((1, 3, 4), (1, 2, 4), -1, None, r"\[0, 2\]"),
        ((1, 3, 4), (1, 2, 4), 2, (1, 3), r"\[0, 1\]"),
        ((1, 3, 4), (1, 2, 4), 1, (1, 2), "exclude"),
    ],
    ids=["groups", "width", "dimensions", "more than rows", "negative", "the excluded one", "shape of exclude"],
)
def test_arguments_that_do_not_fit_are_refused(a, b, k, exclude, message):
    excluded = None if exclude is None else torch.zeros(exclude, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        nearest(torch.ones(a), torch.ones(b), k, excluded)
