"""Token ids as inputs: they stay integers, and only networks that take them are given them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bnn_runner.base import model_problems
from bnn_runner.data import sst2
from bnn_runner.data.sources import File
from bnn_runner.data.sst2 import SST2, encode, shuffle_words, vocabulary_ids, words_of
from bnn_runner.errors import UserError
from bnn_runner.tasks import Split, TaskSpec
from tests.choices import MODELS, small_model

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


# ------------------------------------------------------------------------------------------ SST-2


def test_words_get_ids_by_frequency_and_the_rest_is_unknown() -> None:
    """Planted bugs: padding confused with unknown words; a vocabulary one too large; ties in the order of a set."""
    sentences = [words_of(text) for text in ("b a a c", "A b a d", "a c")]
    ids = vocabulary_ids(sentences, 4)
    assert ids == {"a": 2, "b": 3}
    assert vocabulary_ids(sentences, 100) == {"a": 2, "b": 3, "c": 4, "d": 5}
    assert encode(words_of("a z b"), ids, 5).tolist() == [2, 1, 3, 0, 0]
    assert encode(words_of("a z b"), ids, 2).tolist() == [2, 1]
    assert encode([], ids, 2).tolist() == [0, 0]


def test_shuffled_sentences_keep_their_words() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9, 0, 0], [4, 0, 0, 0, 0, 0, 0]]).repeat(20, 1)
    mixed = shuffle_words(tokens, 0)
    assert torch.equal(mixed.sort(1).values, tokens.sort(1).values)
    assert torch.equal(mixed == 0, tokens == 0) and not torch.equal(mixed, tokens)
    assert len({tuple(row) for row in mixed[::2].tolist()}) > 5  # each in an order of its own


def test_the_vocabulary_is_of_the_training_part_alone(tmp_path, monkeypatch) -> None:
    """Planted bug: words of validation or test sentences get ids, so that the test part shapes the inputs."""
    (tmp_path / "SST2").mkdir()
    for part, count in (("train", 20), ("dev", 10), ("test", 5)):
        lines = [f"{part}{i} common\t{i % 2}" for i in range(count)]
        (tmp_path / "SST2" / f"{part}.tsv").write_text("\n".join(lines) + "\n")
    source = replace(sst2.SOURCE, files=tuple(File(f.name) for f in sst2.SOURCE.files))
    monkeypatch.setattr(sst2, "SOURCE", source)
    monkeypatch.setattr(sst2, "NUM_TRAIN", 30)
    monkeypatch.setattr(sst2, "NUM_TEST", 5)
    task = SST2(vocabulary=100, length=3, val_fraction=0.2, train_size=None, test_size=None).load(tmp_path, 0)
    assert [len(s) for s in (task.train, task.val, task.test)] == [24, 6, 5]
    assert sorted(task.train.inputs[:, 0].tolist()) == list(range(3, 27)) and bool((task.train.inputs[:, 1] == 2).all())
    for held in (task.val, task.test):
        assert bool((held.inputs[:, 0] == 1).all()) and bool((held.inputs[:, 1] == 2).all())
    (tmp_path / "SST2" / "dev.tsv").write_text("fine\t1\nno label\n")
    with pytest.raises(UserError, match=r"dev\.tsv, line 2"):
        SST2(vocabulary=100, length=3, val_fraction=0.2, train_size=None, test_size=None).load(tmp_path, 0)
    with pytest.raises(UserError) as caught:
        SST2(vocabulary=2, length=0, val_fraction=0.2, train_size=None, test_size=None).spec()
    assert len(caught.value.problems) == 2
