"""SST-2: sentences of film reviews, positive or negative (Socher et al., 2013), as token ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bnn_runner.data.downloads import ensure
from bnn_runner.data.field_checks import is_integer
from bnn_runner.data.read_once import once
from bnn_runner.data.sources import File, Source
from bnn_runner.data.splits import Sizes, divide, fingerprint
from bnn_runner.errors import UserError, raise_all
from bnn_runner.rng import generator
from bnn_runner.tasks import Split, Task, TaskSpec

NUM_TRAIN, NUM_TEST = 6_919 + 871, 1_820
SOURCE = Source(
    name="sst2",
    folder="SST2",
    files=(
        File("train.tsv", 720_259, "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920"),
        File("dev.tsv", 92_057, "eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359"),
        File("test.tsv", 188_749, "831169c7e2e429d6026e1bdbb542f33b636e3e596caad9602ebc953c205928b7"),
    ),
    by_hand="They must contain the sentences of the Stanford Sentiment Treebank with two classes, one per line, "
    "followed by a tab and 0 or 1, without a header.",
)
PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"[\w']+|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class SST2:
    """Sentences as the ids of their lower-cased words [length], padded at the end with 0; longer ones are truncated.

    The words are the `vocabulary` - 2 most frequent ones of the training part; any other is id 1. The
    published training and development sentences are one set, of which `val_fraction` is set aside.
    The set "shuffled" holds the test sentences with their words in random order.
    """

    vocabulary: int
    length: int
    val_fraction: float
    train_size: int | None
    test_size: int | None

    cites: ClassVar[tuple[str, ...]] = ("socher2013",)

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for invalid values."""
        problems = [
            f"data.{key} must be a whole number of at least {least} ({what}); got {value}."
            for key, value, what, least in (
                ("vocabulary", self.vocabulary, "token ids, including padding and unknown words", 3),
                ("length", self.length, "words per sentence", 1),
            )
            if not (is_integer(value) and value >= least)
        ]
        raise_all(problems + self._sizes.problems(NUM_TRAIN, NUM_TEST))
        return TaskSpec("sst2", "classification", (self.length,), 2, self.val_fraction, self.vocabulary)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def sources(self) -> Sequence[Source]:
        return (SOURCE,)

    def partner_sources(self) -> Mapping[str, Source]:
        return {}

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the sentences. Raises `UserError` if files are missing or not the published ones."""
        spec = self.spec()
        place = ensure(SOURCE, data_dir)
        names = ("train", "dev", "test")
        train_set, dev_set, test_set = once(place, lambda: [_read(place / f"{name}.tsv") for name in names])
        training = train_set + dev_set
        sentences = training + test_set
        labels = torch.tensor([label for _, label in sentences])
        rows, first = torch.arange(len(sentences)), len(training)
        parts = divide(rows[:first], rows[first:], self._sizes, seed, labels[:first], labels[first:])
        ids = vocabulary_ids((sentences[i][0] for i in parts.train.tolist()), self.vocabulary)
        tokens = torch.stack([encode(words, ids, self.length) for words, _ in sentences])

        def part(chosen: Tensor) -> Split:
            return Split(tokens[chosen], labels[chosen], chosen)

        train, val, test = part(parts.train), part(parts.val), part(parts.test)
        longer = sum(len(words) > self.length for words, _ in training)
        return Task(
            spec=spec,
            train=train,
            val=val,
            test=test,
            ood={"shuffled": Split(shuffle_words(tokens[parts.test], seed), None, torch.arange(len(test)))},
            fingerprint=fingerprint(train, val.ids, torch.tensor([self.vocabulary, self.length])),
            target_mean=torch.zeros(2),
            target_scale=torch.ones(2),
            class_names=("negative", "positive"),
            notes=(f"{len(ids)} words of the training part have an id; {longer} training sentences are truncated",),
        )


def words_of(text: str) -> list[str]:
    """Lower-cased words, and punctuation marks each by itself.

    >>> words_of("It does n't, quite.")
    ['it', 'does', "n't", ',', 'quite', '.']
    """
    return _WORD.findall(text.lower())


def vocabulary_ids(sentences: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Ids, from 2 on, of the `size` - 2 most frequent words; ties are ordered alphabetically."""
    counts = Counter(word for words in sentences for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return {word: i for i, word in enumerate(ranked, UNKNOWN + 1)}


def encode(words: Sequence[str], ids: Mapping[str, int], length: int) -> Tensor:
    """Ids [length]: truncated, or padded with 0 at the end."""
    row = [ids.get(word, UNKNOWN) for word in words[:length]]
    return torch.tensor(row + [PADDING] * (length - len(row)), dtype=torch.int64)


def shuffle_words(tokens: Tensor, seed: int) -> Tensor:
    """Each row's words in a random order of its own; the padding stays at the end."""
    keys = torch.rand(tokens.shape, generator=generator(seed, "sst2", "shuffled"))
    return tokens.gather(1, keys.masked_fill(tokens == PADDING, 2.0).argsort(dim=1, stable=True))


def _read(path: Path) -> list[tuple[list[str], int]]:
    """Words and class of every line. Raises `UserError` naming a line that is not text, tab, 0 or 1."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text, tab, label = line.rpartition("\t")
        if not tab or label not in ("0", "1"):
            raise UserError(f"{path}, line {number} must be a sentence, a tab, and 0 or 1. Replace the file.")
        rows.append((words_of(text), int(label)))
    return rows
