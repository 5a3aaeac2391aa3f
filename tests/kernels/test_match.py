import pytest
import torch

from tokred.kernels import match
from tokred.kernels.match import fast, naive


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (1, 7, 5, 8), (3, 6, 11, 16), (2, 33, 1, 3), (2, 65, 70, 20)], ids=str)
@pytest.mark.parametrize("blocked", [False, True], ids=["one block", "blocks"])
def test_same_as_reference(shape, dtype, blocked, device, generator, monkeypatch):
    groups, m, n, width = shape
    a = torch.randn(groups, m, width, generator=generator).to(dtype).to(device)
    b = torch.randn(groups, n, width, generator=generator).to(dtype).to(device)
    if blocked:
        inputs = (a.numel() + b.numel()) * max(4, a.element_size())
        monkeypatch.setattr(fast, "scratch_limit", lambda *_: inputs + groups * n * 8 * 5)
    values, index = match(a, b)
    expected_values, expected_index = naive.match(a, b)
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert index.dtype == torch.int64
    torch.testing.assert_close(values, expected_values)
    assert torch.equal(index, expected_index)


def test_values_are_cosines(device, generator):
    a, b = (torch.randn(1, n, 8, generator=generator, device="cpu").to(device) for n in (5, 9))
    cosine = torch.nn.functional.cosine_similarity(a[0, :, None], b[0, None], dim=-1)
    values, index = match(a, b)
    torch.testing.assert_close(values[0], cosine.amax(1))
    assert torch.equal(index[0], cosine.argmax(1))


def test_length_does_not_matter(device, generator):
    a, b = (torch.randn(1, n, 8, generator=generator).to(device) for n in (5, 9))
    scale = torch.logspace(-6, 6, 9, device=device)[None, :, None]
    assert torch.equal(match(a, b * scale)[1], match(a, b)[1])


def test_equal_similarities_give_the_lowest_row(device):
    # Axis-parallel rows: all products are exact, whatever the order of summation.
    b = torch.eye(4, device=device)[[3, 1, 2, 1, 2, 2, 3]].unsqueeze(0)
    a = torch.eye(4, device=device)[[1, 2, 3, 0]].unsqueeze(0)
    values, index = match(a, b)
    assert index.tolist() == [[1, 2, 0, 0]]
    assert values.tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_zero_row_has_no_direction(device):
    a = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [-1.0, 0.1]]], device=device)
    b = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]], device=device)
    values, index = match(a, b)
    assert index.tolist() == [[0, 1, 0]]
    assert values.tolist() == [[0.0, 1.0, 0.0]]


def test_groups_do_not_mix(device, generator):
    a, b = (torch.randn(4, n, 8, generator=generator).to(device) for n in (6, 10))
    alone = torch.cat([match(a[g : g + 1], b[g : g + 1])[1] for g in range(4)])
    assert torch.equal(match(a, b)[1], alone)


def test_half_precision_is_compared_in_full(device):
    # In bfloat16 both cosines round to 1 and the first row would win.
    b = torch.tensor([[[1.0, 0.0625], [1.0, 0.03125]]], dtype=torch.bfloat16, device=device)
    a = torch.tensor([[[1.0, 0.0]]], dtype=torch.bfloat16, device=device)
    assert match(a, b)[1].tolist() == [[1]]


def test_autocast_changes_nothing(device, generator):
    a, b = (torch.randn(1, n, 32, generator=generator).to(device) for n in (20, 30))
    expected = match(a, b)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = match(a, b)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_nothing_to_match(device):
    values, index = match(torch.empty(2, 0, 3, device=device), torch.ones(2, 4, 3, device=device))
    assert values.shape == index.shape == (2, 0)
    assert match(torch.empty(0, 5, 3, device=device), torch.empty(0, 4, 3, device=device))[1].shape == (0, 5)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((2, 3, 4), (1, 3, 4), "expected a"),
        ((2, 3, 4), (2, 3, 5), "expected a"),
        ((3, 4), (3, 4), "expected a"),
        ((1, 3, 4), (1, 0, 4), "cannot match 3 rows"),
    ],
    ids=["groups", "width", "dimensions", "no rows"],
)
def test_shapes_that_do_not_fit_are_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        match(torch.ones(a), torch.ones(b))
