"""One thread a process and fixed seeds for every test; `--update-golden` writes golden files anew."""

from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


def pytest_configure() -> None:
    # Tests of several ranks run that many processes on few cores: more threads would only wait for each other.
    torch.set_num_threads(1)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def same_random_numbers() -> Iterator[None]:
    """Every test starts from the same torch generator and leaves the default dtype as it found it."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
