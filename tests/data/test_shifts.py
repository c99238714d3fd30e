"""Shifted test sets: what each change does, that noise is each image's own, and the scores level by level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bnn_runner.data.image_datasets import PublishedImages
from bnn_runner.data.images import PixelScaling
from bnn_runner.data.shifts import CLEAN, SHIFTS, rotate, shift_problems, shifted
from bnn_runner.errors import UserError
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.metrics.shift import Shift
from bnn_runner.report.curve_figures import shift_curves
from bnn_runner.rng import generator
from bnn_runner.tasks import LazyInputs, Split
from tests.choices import fitted

SCALING = PixelScaling(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def images(count: int = 6, size: int = 8) -> Split:
    pixels = torch.randint(0, 256, (count, 3, size, size), generator=generator(0, "images"), dtype=torch.uint8)
    return Split(pixels, torch.arange(count) % 2, torch.arange(100, 100 + count), SCALING)


@pytest.mark.parametrize("name", SHIFTS)
def test_every_level_is_a_function_of_the_image_alone(name: str) -> None:
    """Planted bugs: fresh noise in each batch (draws would see other images); noise by place instead of by id."""
    split = images()
    made = shifted(split, [name], seed=3)
    assert len(made) == 1 + len(SHIFTS[name][1]) and made[CLEAN] is split
    for level, changed in made.items():
        assert torch.equal(changed.targets, split.targets) and torch.equal(changed.ids, split.ids), level
        x, _ = changed.gather(torch.arange(6))
        assert x.shape == (6, 3, 8, 8) and bool(torch.isfinite(x).all())
        bounds = SCALING(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1))
        assert bool((x >= bounds[0] - 1e-5).all()) and bool((x <= bounds[1] + 1e-5).all())
        alone = torch.cat([changed.gather(torch.tensor([i]))[0] for i in (4, 1)])
        torch.testing.assert_close(alone, x[[4, 1]], rtol=1e-5, atol=1e-5)
        few = changed.subset(torch.tensor([5, 2]))
        torch.testing.assert_close(few.gather(torch.arange(2))[0], x[[5, 2]], rtol=1e-5, atol=1e-5)
        moved = changed.to(torch.device("cpu"), torch.float64).gather(torch.arange(6))[0]
        assert moved.dtype == torch.float64
        torch.testing.assert_close(moved.float(), x)


@pytest.mark.parametrize("name", [n for n in SHIFTS if n != "rotation"])
def test_corruptions_grow_with_the_level(name: str) -> None:
    """Planted bug: levels in the wrong order, or strength ignored."""
    split = images(40, 16)
    smooth = torch.nn.functional.interpolate(split.inputs[:, :, ::4, ::4].float(), size=16, mode="bilinear")
    made = shifted(replace(split, inputs=smooth.round().to(torch.uint8)), [name], seed=0)
    clean, _ = made[CLEAN].gather(torch.arange(40))
    gaps = [
        float((made[f"{name}/{level}"].gather(torch.arange(40))[0] - clean).abs().mean()) for level in SHIFTS[name][1]
    ]
    # Pixels of 15 and of 14 to a side of 16 differ little, so pixelation is compared end to end.
    assert (gaps == sorted(gaps) or name == "pixelate") and 0 < gaps[0] < gaps[-1]


def test_noise_has_the_stated_size() -> None:
    grey = Split(torch.full((200, 1, 8, 8), 128, dtype=torch.uint8), None, torch.arange(200), lambda x: x.float() / 255)
    made = shifted(grey, ["gaussian_noise", "impulse_noise"], seed=0)
    noise = made["gaussian_noise/5"].gather(torch.arange(200))[0] - 128 / 255
    n = noise.numel()
    assert abs(float(noise.std()) / 0.1 - 1) < 4 / (2 * n) ** 0.5 and abs(float(noise.mean())) < 4 * 0.1 / n**0.5
    impulse = made["impulse_noise/5"].gather(torch.arange(200))[0]
    for value in (0.0, 1.0):
        share = float((impulse == value).double().mean())
        assert abs(share - 0.035) < 4 * (0.035 / n) ** 0.5


def test_rotation_turns_about_the_centre() -> None:
    """Planted bugs: the wrong way round, an off-centre axis, a stretched picture."""
    x = torch.rand(2, 1, 9, 9, generator=generator(0, "rotation"))
    none = torch.zeros(0)
    torch.testing.assert_close(rotate(x, 90, none), torch.rot90(x, 1, (2, 3)), rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(x, 180, none), x.flip(2, 3), rtol=0, atol=1e-5)
    wide = torch.rand(1, 1, 6, 12, generator=generator(0, "wide"))
    torch.testing.assert_close(rotate(wide, 180, none), wide.flip(2, 3), rtol=0, atol=1e-5)
    # A disc about the centre of a wide picture stays a disc.
    rows, columns = torch.meshgrid(torch.arange(21) - 10.0, torch.arange(41) - 20.0, indexing="ij")
    disc = torch.exp(-(rows.square() + columns.square()) / 30).view(1, 1, 21, 41)
    torch.testing.assert_close(rotate(disc, 45, none), disc, rtol=0, atol=0.02)


def test_scores_of_every_level_on_the_same_points() -> None:
    """Planted bugs: other points at each level; out-of-distribution treatment (no labels); a level not scored."""
    case = fitted("laplace_diag", "lenet", "classification")
    task, method, posterior = case.task, case.method, case.posterior
    flip = {CLEAN: task.test, "turn/15": replace(task.test, inputs=-task.test.inputs), "turn/30": task.test}
    made = evaluate(replace(task, shifted=flip), posterior, method.predictive, 4, 0, 2, max_ood=0, max_shift=2)
    assert {n for n in made.splits if n.startswith("shift/")} == {f"shift/{name}" for name in flip}
    ids = [made.splits[f"shift/{name}"].ids.tolist() for name in flip]
    assert len(ids[0]) == 2 and ids[0] == ids[1] == ids[2] and set(ids[0]) <= set(task.test.ids.tolist())
    scores = Shift(15)(made, 0)
    values = {(s.metric, s.split): s.value for s in scores}
    assert set(values) == {
        (f"shift_{m}", f"shift/{name}") for m in ("marginal_loglik", "accuracy", "ece") for name in flip
    }
    assert values["shift_marginal_loglik", "shift/clean/0"] == values["shift_marginal_loglik", "shift/turn/30"]
    assert values["shift_marginal_loglik", "shift/clean/0"] != values["shift_marginal_loglik", "shift/turn/15"]
    places = torch.isin(made.test.ids, made.splits["shift/clean/0"].ids)
    torch.testing.assert_close(made.splits["shift/clean/0"].loglik, made.test.loglik[:, places])
    assert shift_curves(scores, "title") is not None and shift_curves([], "title") is None
    # Without a number of points there is no shift, whatever the task has.
    assert not any(
        n.startswith("shift/")
        for n in evaluate(replace(task, shifted=flip), posterior, method.predictive, 4, 0, 2, max_ood=0).splits
    )


def test_what_is_asked_for_is_checked_and_trains_nothing_new(tmp_path, monkeypatch) -> None:
    (problem,) = shift_problems(["rotation", "blurr"])
    assert "'blurr'" in problem and "gaussian_blur" in problem
    assert shift_problems("rotation") and not shift_problems(())
    fields = {"val_fraction": 0.1, "train_size": None, "test_size": None}
    with pytest.raises(UserError, match=r"data\.shifts"):
        PublishedImages(name="mnist", shifts=("blurr",), **fields).spec()
    assert isinstance(shifted(images(), ["contrast"], 0)["contrast/1"].inputs, LazyInputs)
