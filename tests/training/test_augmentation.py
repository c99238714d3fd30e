"""Augmentation: what it does to an image, whose random numbers it uses, and that posteriors never see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.errors import Interrupted, UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.methods.laplace import Laplace
from bnn_runner.rng import generator
from bnn_runner.training.augmentation import CropFlip, Unchanged
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.state import Lane
from tests.problems import context, make_task
from tests.training.test_lanes import ADAM, CPU, Conv, assert_close, assert_equal, config, stop_after, train

EVERYTHING = CropFlip(padding=2, flip=True, cutout=3)


def one_by_one(image: Tensor, chosen: list[int], padding: int, cutout: int) -> Tensor:
    """One image [C, H, W], pixel by pixel."""
    top, left, mirrored, row, column = chosen
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for i in range(height):
        for j in range(width):
            from_i, from_j = i + top - padding, (width - 1 - j if mirrored else j) + left - padding
            if 0 <= from_i < height and 0 <= from_j < width:
                result[:, i, j] = image[:, from_i, from_j]
            if cutout and 0 <= i - row + cutout // 2 < cutout and 0 <= j - column + cutout // 2 < cutout:
                result[:, i, j] = 0.0
    return result


@pytest.mark.parametrize("augment", [EVERYTHING, CropFlip(0, False, 4), CropFlip(3, False, 0), CropFlip(0, True, 0)])
def test_every_image_is_moved_as_it_was_drawn(augment: CropFlip) -> None:
    """Planted bugs: rows and columns swapped; one draw for the whole batch; images mirrored after they are shifted
    the wrong way; the hole moved with the image; a hole of another size at the border."""
    x = torch.randn(40, 2, 6, 5, generator=generator(0, "test images"))
    chosen = augment.choose(40, (2, 6, 5), generator(0, "test choices"))
    result = augment(x, chosen)
    assert result.shape == x.shape
    for i, image in enumerate(x):
        torch.testing.assert_close(
            result[i], one_by_one(image, chosen[i].tolist(), augment.padding, augment.cutout), rtol=0, atol=0
        )
    distinct = {tuple(row) for row in chosen.tolist()}
    assert len(distinct) > (1 if augment == CropFlip(0, True, 0) else 10)
    if augment.flip:
        assert 5 < int(chosen[:, 2].sum()) < 35
    if augment.padding:
        assert set(chosen[:, 0].tolist()) == set(range(2 * augment.padding + 1))


def test_a_lane_sees_what_it_would_see_alone() -> None:
    """Planted bugs: one stream for all lanes; a stream of the group's first seed; augmentation that does nothing."""
    task = make_task("classification", (1, 6, 6), 2, num_train=19)
    r = config(Conv(), replace(ADAM, epochs=2), augment=EVERYTHING, stack="always")
    lanes = [Lane(task, 1), Lane(task, 2)]
    together = train(r, lanes)
    for lane, network in zip(lanes, together, strict=True):
        assert_close(network, train(r, [lane])[0], rtol=1e-8, atol=1e-9)
    clean = train(replace(r, augment=Unchanged()), [lanes[0]])[0]
    assert float((clean.parameters["conv.weight"] - together[0].parameters["conv.weight"]).abs().max()) > 1e-4
    assert clean.prior_precision == together[0].prior_precision


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_resumed_training_sees_the_same_images(tmp_path: Path, steps: int) -> None:
    """Planted bugs: numbers drawn from a generator that starts again; the same numbers in every epoch."""
    task = make_task("classification", (1, 6, 6), 2, num_train=37)
    r = config(Conv(), replace(ADAM, epochs=3), augment=EVERYTHING)
    path, lanes = tmp_path / "x.pt", [Lane(task, 1)]
    with pytest.raises(Interrupted):
        LaneTrainer(r, lanes, CPU).train(path, *stop_after(steps))
    assert_equal(train(r, lanes, checkpoint=path)[0], train(r, lanes)[0])
    group = LaneTrainer(r, lanes, CPU)
    assert not torch.equal(group._epoch(0)[1], group._epoch(1)[1])


def test_posteriors_are_fitted_to_clean_images() -> None:
    """Planted bug (PITFALLS C4): a fit over augmented batches, so that two fits of one network differ."""
    task = make_task("classification", (1, 6, 6), 2, num_train=12)
    network = train(config(Conv(), replace(ADAM, epochs=1, warmup_epochs=0), augment=EVERYTHING), [Lane(task, 1)])[0]
    method = Laplace(structure="kfac")
    first, second = (method.fit(task, [network], context()) for _ in range(2))
    assert first.report.facts["evidence_nats"] == second.report.facts["evidence_nats"]
    x = task.test.inputs
    assert torch.equal(first.draws(3, 0)(x), second.draws(3, 0)(x))


def problems(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_experiment(overrides)
    return str(caught.value)


def test_it_is_refused_where_there_is_no_image(tmp_path: Path) -> None:
    """Planted bug: a table whose columns are cropped."""
    told = problems("data=yacht", "augment=crop_flip", f"output_dir={tmp_path}")
    assert "data=yacht" in told and "augment=none" in told
    assert "augment.padding must be 0 or more" in problems("data=mnist", "augment=crop_flip", "augment.padding=-1")


@pytest.mark.exhaustive
def test_it_is_part_of_the_training(tmp_path: Path) -> None:
    """Planted bug: an augmented network taken from the cache for a clean one."""
    from bnn_runner.config.keys import training_key

    def key(*overrides: str) -> str:
        config: dict[str, Any] = load_experiment(["data=mnist", "method=map", *overrides]).config
        return training_key(config, "classification", "f", 1, ())

    crops = key("augment=crop_flip"), key("augment=crop_flip", "augment.flip=false"), key("augment=crop_flip_cutout")
    assert len({key(), *crops}) == 4 and key() == key("augment=none")
