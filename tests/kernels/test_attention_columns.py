import pytest
import torch

from tokred.kernels import attention_columns
from tokred.kernels.attention_columns import fast, naive

SHAPES = [(1, 1, 1, 1, 1, 4), (2, 4, 4, 9, 9, 8), (2, 6, 2, 5, 7, 8), (3, 4, 1, 33, 20, 16)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("blocked", [False, True], ids=["one block", "blocks"])
def test_same_as_reference(shape, dtype, blocked, device, generator, monkeypatch):
    groups, heads, kv_heads, queries, keys, width = shape
    query = torch.randn(groups, heads, queries, width, generator=generator).to(dtype).to(device)
    key = torch.randn(groups, kv_heads, keys, width, generator=generator).to(dtype).to(device)
    if blocked:
        monkeypatch.setattr(fast, "scratch_limit", lambda *_: 3 * 8 * groups * kv_heads * keys * 2)
    columns = attention_columns(query, key, 0.3)
    assert columns.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(columns, naive.attention_columns(query, key, 0.3))
    torch.testing.assert_close(columns.sum(1), torch.ones_like(columns[:, 0]))


def test_equal_keys_share_equally(device, generator):
    query = torch.randn(1, 2, 5, 4, generator=generator).to(device)
    key = torch.ones(1, 2, 8, 4, device=device)
    torch.testing.assert_close(attention_columns(query, key, 1.0), torch.full((1, 8), 1 / 8, device=device))


def test_a_key_that_all_look_at_gets_all(device):
    query = torch.ones(1, 1, 3, 2, device=device)
    key = torch.tensor([[[[0.0, 0.0], [50.0, 50.0], [0.0, 0.0]]]], device=device)
    torch.testing.assert_close(attention_columns(query, key, 1.0), torch.tensor([[0.0, 1.0, 0.0]], device=device))


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        ((1, 2, 3), (1, 2, 3, 4), "expected query"),
        ((1, 2, 3, 4), (1, 2, 3, 5), "expected query"),
        ((1, 3, 3, 4), (1, 2, 3, 4), "3 heads cannot share 2"),
        ((1, 2, 0, 4), (1, 2, 3, 4), "no queries"),
    ],
)
def test_bad_shapes_are_named(query, key, message):
    with pytest.raises(ValueError, match=message):
        attention_columns(torch.zeros(query), torch.zeros(key), 1.0)
