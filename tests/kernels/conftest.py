import pytest
import torch


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
