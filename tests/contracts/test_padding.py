"""Padding must be at the end of rows, for every family and backend; rows of padding only have no effect."""

import pytest
import torch
from cases import tiny_model

from bertsmith.errors import InputError
from bertsmith.models.model import Model

FAMILIES = [
    "albert-base",
    "bert-tiny",
    "convbert-small",
    "deberta-base",
    "deberta-v3-xsmall",
    "disentangled-small",
    "dynamicconv-base",
    "electra-small",
    "lite-bert-small",
    "modern-small",
    "performer-relu-small",
    "performer-small",
    "universal-base",
]
BACKENDS = ("auto", "reference", "products", "sdpa", "grouped", "blocks", "taps", "chunks")
WRONG = {"left": [0, 0, 1, 1, 1], "interior": [1, 1, 0, 1, 1], "between": [1, 0, 1, 0, 0]}


def supported(model: Model) -> list[str]:
    """Return the backends that support the model's padded inputs on a CPU."""
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 1, 0]])
    names = []
    for name in BACKENDS:
        try:
            model(ids, mask, backend=name)
        except InputError:
            continue
        names.append(name)
    assert {"auto", "reference"} <= set(names)
    return names


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("wrong", WRONG)
def test_padding_before_a_token_raises(name: str, wrong: str) -> None:
    model = tiny_model(name)
    mask = torch.tensor([[1, 1, 1, 1, 0], WRONG[wrong]])
    for backend in supported(model):
        with pytest.raises(InputError, match="padding before a token in row 1; pad at the end"):
            model(torch.randint(0, 50, (2, 5)), mask, backend=backend)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_padding_change_nothing(name: str) -> None:
    model = tiny_model(name)
    ids, mask = torch.randint(0, 50, (3, 5)), torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    for backend in supported(model):
        hidden = model(ids, mask, backend=backend)
        assert hidden.isfinite().all()
        others = model(ids[[0, 2]], mask[[0, 2]], backend=backend)
        is_token = mask[[0, 2]].bool()
        torch.testing.assert_close(hidden[[0, 2]][is_token], others[is_token], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_batch_of_padding_only_is_finite(name: str) -> None:
    model = tiny_model(name)
    ids, mask = torch.randint(0, 50, (2, 4)), torch.zeros(2, 4, dtype=torch.long)
    for backend in supported(model):
        assert model(ids, mask, backend=backend).isfinite().all()
