import pytest
import torch

from tokred.kernels import topk_indices
from tokred.kernels.topk_indices import naive

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def _scores(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Few distinct values, so that most of them tie."""
    high = max(3, shape[-1] // 3)
    values = torch.randint(0, min(high, 200), shape, generator=generator)
    return values.to(dtype) if dtype == torch.uint8 else (values - high // 2).to(dtype)


# The long rows take the selection on CPU, all others the sort.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (1, 33), (3, 2, 17), (2, 2048), (2, 2501)], ids=str)
def test_same_as_reference(shape, dtype, device, generator):
    scores = _scores(shape, dtype, generator).to(device)
    n = shape[-1]
    for k in sorted({0, 1, n // 4, n // 2, n - 1, n}):
        got = topk_indices(scores, k)
        assert got.dtype == torch.int64
        assert torch.equal(got, naive.topk_indices(scores, k)), k


@pytest.mark.parametrize("n", [9, 4096], ids=["sort", "select"])
def test_equal_scores_come_lowest_index_first(n, device):
    assert topk_indices(torch.zeros(n, device=device), n // 2).tolist() == list(range(n // 2))


@pytest.mark.parametrize("n", [9, 4096], ids=["sort", "select"])
def test_zeros_of_either_sign_tie(n, device):
    scores = torch.zeros(n, device=device)
    scores[::2] = -0.0
    assert topk_indices(scores, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [8, 4096], ids=["sort", "select"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_ranks_below_minus_infinity(n, dtype, device):
    scores = torch.full((n,), float("nan"), dtype=dtype, device=device)
    scores[3], scores[5], scores[6] = -float("inf"), 1.0, float("inf")
    assert topk_indices(scores, 4).tolist() == [6, 5, 3, 0]
    negative_nan = -scores[0]
    scores[0] = negative_nan
    assert topk_indices(scores, 4).tolist() == [6, 5, 3, 0]


def test_most_negative_integer_ranks_last(device):
    scores = torch.tensor([torch.iinfo(torch.int64).min, 0, -1], device=device)
    assert topk_indices(scores, 3).tolist() == [1, 2, 0]


def test_no_rows(device):
    assert topk_indices(torch.empty(0, 5, device=device), 2).shape == (0, 2)
    assert topk_indices(torch.empty(4, 0, device=device), 0).shape == (4, 0)


@pytest.mark.parametrize("n", [16, 4096], ids=["sort", "select"])
def test_scores_with_gradient_and_strides(n, generator):
    base = torch.randn(n, 2, generator=generator, requires_grad=True)
    scores = base[:, 1]
    expected = topk_indices(scores.detach().clone(), 5)
    assert torch.equal(topk_indices(scores, 5), expected)


@pytest.mark.parametrize("k", [-1, 5])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(ValueError, match=rf"\[0, 4\].*got {k}"):
        topk_indices(torch.zeros(2, 4), k)


def test_scalar_is_refused():
    with pytest.raises(ValueError, match="dimension"):
        topk_indices(torch.tensor(1.0), 0)
