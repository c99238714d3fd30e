"""Token ids as inputs: they stay integers, and only networks that take them are given them."""

from __future__ import annotations

import pytest
import torch

from bnn_runner.base import model_problems
from bnn_runner.tasks import Split, TaskSpec
from tests.contract.choices import MODELS, small_model

TOKENS = TaskSpec("made_up_text", "classification", (7,), 2, 0.1, vocabulary=30)


@pytest.mark.parametrize("name", MODELS)
def test_networks_of_numbers_refuse_token_ids(name: str) -> None:
    """Planted bug: a perceptron that takes ids for magnitudes."""
    model = small_model(name)
    if getattr(model, "takes_tokens", False):
        taken = model_problems(model, TOKENS) == []
        assert taken is (name != "module")  # the stand-in for a user's own network is one of images
        return
    (problem,) = model_problems(model, TOKENS)
    assert "token ids" in problem and "made_up_text" in problem and "model=" in problem


def test_token_ids_stay_integers() -> None:
    """Planted bug: ids cast to the network's precision, so that an embedding refuses or rounds them."""
    ids = torch.tensor([[5, 2**24 + 1, 0]])
    split = Split(ids, torch.tensor([1]), torch.tensor([0])).to(torch.device("cpu"), torch.float32)
    x, _ = split.gather(torch.tensor([0]))
    assert x.dtype == torch.int64 and torch.equal(x, ids)
