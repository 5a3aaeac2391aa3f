import pytest
import torch

from tokred.kernels import gather
from tokred.kernels.gather import naive

SHAPES = [(1, 7, 3), (1, 5), (3, 9, 4), (2, 6, 2, 5), (4, 1, 8), (2, 11)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_reference(shape, dtype, device, generator):
    x = (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)
    for picks in (0, 1, shape[1], 2 * shape[1]):
        index = torch.randint(0, shape[1], (shape[0], picks), generator=generator).to(device)
        got = gather(x, index)
        assert got.shape == (shape[0], picks, *shape[2:])
        assert got.dtype == dtype
        assert torch.equal(got, naive.gather(x, index)), picks


@pytest.mark.parametrize("batch", [1, 3])
def test_strided_input(batch, device, generator):
    x = torch.randn(batch, 4, 10, 6, generator=generator).to(device).transpose(1, 2)[:, 2:, :, ::2]
    index = torch.randint(0, 8, (batch, 5), generator=generator).to(device)
    assert torch.equal(gather(x, index), naive.gather(x, index))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("picks", [0, 3])
def test_result_is_a_copy(batch, picks, device):
    x = torch.zeros(batch, 3, 2, device=device)
    got = gather(x, torch.arange(picks, device=device).expand(batch, picks))
    got.fill_(1)
    assert not x.any()


@pytest.mark.parametrize("batch", [1, 2])
def test_gradient_counts_repeats(batch, device):
    x = torch.zeros(batch, 3, 2, device=device, requires_grad=True)
    with torch.enable_grad():
        gather(x, torch.tensor([[0, 0, 2]], device=device).expand(batch, 3)).sum().backward()
    assert x.grad[:, :, 0].tolist() == [[2.0, 0.0, 1.0]] * batch


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("row", [-1, 3])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_index_out_of_range_is_refused(batch, row, strided):
    x = torch.zeros(batch, 2, 3).transpose(1, 2) if strided else torch.zeros(batch, 3, 2)
    index = torch.zeros(batch, 2, dtype=torch.int64)
    index[0, 1] = row  # within the flattened batch when it is 3, and another sample's
    with pytest.raises(IndexError, match=r"\[0, 3\)"):
        gather(x, index)


@pytest.mark.parametrize(
    ("x", "index"), [((3,), (3, 1)), ((2, 3, 4), (1, 2)), ((2, 3, 4), (2, 2, 1)), ((2, 3), (2,))], ids=str
)
def test_shapes_that_do_not_fit_are_refused(x, index):
    with pytest.raises(ValueError, match="expected x"):
        gather(torch.zeros(x), torch.zeros(index, dtype=torch.int64))
