"""Models for the tests of the torch engine. torch is imported only where a test asks for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def same_threads_after() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torch_cases import make_model

    return make_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torch_cases import make_model

    return make_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)
