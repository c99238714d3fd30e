"""The parts of the data sets one by one: splitting, scaling, generated sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bnn_runner.data.digits import Digits
from bnn_runner.data.gap1d import GAP, Gap1D, smooth_truth
from bnn_runner.data.hetero1d import Hetero1D
from bnn_runner.data.line1d import Line1D
from bnn_runner.data.splits import Sizes, divide, fingerprint, seeded_order
from bnn_runner.data.tables import standardise, table_task
from bnn_runner.data.two_moons import TwoMoons
from bnn_runner.errors import UserError
from bnn_runner.rng import generator
from bnn_runner.tasks import TaskSpec

ALL = {"val_fraction": 0.1, "train_size": None, "test_size": None}


# ------------------------------------------------------------------------------------ splitting


def parts(train_size=None, test_size=None, val_fraction=0.1, seed=0, labels=None):
    rows = torch.arange(150)
    train_labels, test_labels = (None, None) if labels is None else (labels[:100], labels[100:])
    return divide(rows[:100], rows[100:], Sizes(val_fraction, train_size, test_size), seed, train_labels, test_labels)


def test_smaller_parts_are_contained_in_larger_ones():
    whole, half, few = parts(), parts(45, 20), parts(9, 5)
    for small, large in ((few, half), (half, whole)):
        for name in ("train", "val", "test"):
            assert set(getattr(small, name).tolist()) < set(getattr(large, name).tolist()), name
    assert [len(p.train) for p in (whole, half, few)] == [90, 45, 9]
    assert [len(p.val) for p in (whole, half, few)] == [10, 5, 1]
    assert len(set(torch.cat([whole.train, whole.val, whole.test]).tolist())) == 150


def test_the_test_part_depends_on_its_own_size_and_the_seed_only():
    assert torch.equal(parts(test_size=20).test, parts(50, 20, 0.3).test)
    assert not torch.equal(parts(test_size=20).test, parts(test_size=20, seed=1).test)


def test_no_validation_is_allowed():
    none = parts(val_fraction=0)
    assert len(none.val) == 0 and torch.equal(none.train, torch.arange(100))


def test_any_validation_is_at_least_one_point():
    assert len(parts(val_fraction=0.001).val) == 1


def test_every_beginning_of_the_order_is_stratified():
    labels = torch.tensor([0] * 700 + [1] * 200 + [2] * 100)
    order = labels[seeded_order(1000, labels, generator(0, "test"))]
    for m in (10, 50, 333, 1000):
        counts = torch.bincount(order[:m], minlength=3).double()
        assert ((counts - m * torch.tensor([0.7, 0.2, 0.1])).abs() <= 1).all(), m


def test_stratified_parts_hold_the_classes_in_proportion():
    labels = torch.arange(150) % 3
    chosen = parts(30, 15, labels=labels)
    assert torch.bincount(labels[chosen.train]).tolist() == [10, 10, 10]
    assert torch.bincount(labels[chosen.test]).tolist() == [5, 5, 5]


def test_sizes_that_leave_nothing_or_ask_for_too_much_are_refused():
    assert "must leave a point" in Sizes(0.99, None, None).problems(10, 5)[0]
    (problem,) = Sizes(0.1, 95, None).problems(100, 10)
    assert "data.train_size must be at most 90" in problem and "got 95" in problem
    assert Sizes(0.1, 90, 10).problems(100, 10) == []
    assert len(Sizes("a", "b", True).problems(100, 10)) == 3  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- scaling


def table(targets=None, change_test=False, constant=0.1):
    stream = generator(0, "table")
    x = torch.randn(60, 3, generator=stream, dtype=torch.float64) * torch.tensor([1.0, 1e-6, 1.0]) + 5
    x[:, 2] = constant
    y = 100 + 7 * torch.randn(60, 1, generator=stream, dtype=torch.float64) if targets is None else targets
    if change_test:
        x[50:], y[50:] = 1e6, -1e6
    spec = TaskSpec("made_up", "regression", (3,), 1, 0.1)
    rows = torch.arange(60)
    return x, y, table_task(spec, x, y, divide(rows[:50], rows[50:], Sizes(0.1, None, None), 0, None, None))


def test_scaling_is_that_of_the_training_part_without_validation():
    x, y, task = table()
    rows = task.train.ids
    assert len(rows) == 45
    torch.testing.assert_close(task.target_mean, y[rows].mean(0).float())
    torch.testing.assert_close(task.target_scale, y[rows].std(0, correction=0).float())
    torch.testing.assert_close(task.train.inputs[:, :2].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(task.train.inputs[:, :2].std(0, correction=0), torch.ones(2))
    for split in (task.train, task.val, task.test):
        back = task.target_mean + task.target_scale * split.targets
        torch.testing.assert_close(back, y[split.ids].float())
        raw = task.input_mean + task.input_scale * split.inputs
        torch.testing.assert_close(raw, x[split.ids].float())


def test_new_points_are_prepared_as_the_test_points_are():
    """Planted bug: `encode` left out of the task, so that new points reach the network unscaled."""
    x, _, task = table()
    new = task.new_points(x[task.test.ids])
    assert torch.equal(new.inputs, task.test.inputs) and new.targets is None
    moved = task.to(torch.device("cpu"), torch.float64).new_points(x[task.test.ids])
    assert moved.inputs.dtype == torch.float64


def test_test_points_do_not_leak_into_training():
    before, after = table()[2], table(change_test=True)[2]
    assert torch.equal(before.train.inputs, after.train.inputs)
    assert torch.equal(before.train.targets, after.train.targets)
    assert before.fingerprint == after.fingerprint
    assert not torch.equal(before.test.inputs, after.test.inputs)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3e7])
def test_a_constant_column_gets_scale_one_and_a_note(constant):
    task = table(constant=constant)[2]
    assert task.input_scale[2] == 1 and (task.train.inputs[:, 2].abs() < 1e-6).all()
    assert len(task.notes) == 1 and "column 2" in task.notes[0]


def test_rounding_does_not_count_as_variation_but_small_variation_does():
    values = torch.full((1000, 2), 0.1, dtype=torch.float64)
    values[::2, 0] += 1e-17
    values[::3, 0] = 0.1 + 2e-17
    values[::2, 1] *= 1 + 1e-6
    assert standardise(values).constant == (0,)


def test_a_constant_target_is_refused():
    with pytest.raises(UserError, match="must vary; got the same value in all 45 training points"):
        table(targets=torch.full((60, 1), 0.1, dtype=torch.float64))


def test_the_fingerprint_follows_what_a_training_sees():
    base = Digits(**ALL)
    prints = [
        replace(base, **change).load(Path(), seed).fingerprint
        for change, seed in (({}, 0), ({}, 1), ({"val_fraction": 0.2}, 0), ({"train_size": 100}, 0))
    ]
    assert len(set(prints)) == 4
    assert replace(base, test_size=50).load(Path(), 0).fingerprint == prints[0]
    train = base.load(Path(), 0).train
    assert fingerprint(train, torch.tensor([1])) != fingerprint(train, torch.tensor([2]))
    assert fingerprint(train, train.ids, torch.tensor([1.0])) != fingerprint(train, train.ids, torch.tensor([2.0]))
    assert fingerprint(replace(train, targets=train.targets.flip(0)), train.ids) != fingerprint(train, train.ids)


# ------------------------------------------------------------------------------- generated sets


def test_gap1d_has_its_gap_and_its_noise():
    task = Gap1D(num_train=4000, num_test=4000, noise=0.3, **ALL).load(Path(), 0)
    x = task.input_mean + task.input_scale * torch.cat([task.train.inputs, task.test.inputs])
    assert x.abs().min() >= GAP and (x > 0).any() and (x < 0).any()
    y = task.target_mean + task.target_scale * torch.cat([task.train.targets, task.test.targets])
    residual = (y - task.truth(x)).squeeze(1)
    n = len(residual)
    assert residual.mean().abs() < 4 * 0.3 / n**0.5
    assert (residual.std() / 0.3 - 1).abs() < 4 / (2 * n) ** 0.5
    inside = task.input_mean + task.input_scale * task.ood["gap"].inputs
    assert inside.abs().max() < GAP
    beyond = task.input_mean + task.input_scale * task.ood["far"].inputs
    assert beyond.abs().min() > x.abs().max()
    assert torch.equal(task.truth(x), smooth_truth(x))


def test_gap1d_tells_all_its_mistakes():
    with pytest.raises(UserError) as caught:
        Gap1D(num_train=0, num_test=2.5, noise=-1, val_fraction=2, train_size=None, test_size=None).spec()
    assert len(caught.value.problems) == 4


def test_targets_of_the_line_are_standardised_or_left_as_they_are():
    """Planted bugs: targets left alone that are reported as scaled; one fingerprint for both."""
    scaled, plain = (
        Line1D(num_train=50, num_test=20, noise=1.0, standardise=s, **ALL).load(Path(), 0) for s in (True, False)
    )
    assert (float(plain.target_mean), float(plain.target_scale)) == (0.0, 1.0)
    assert abs(float(scaled.train.targets.mean())) < 1e-6 and 7 < float(plain.train.targets.mean()) < 9
    original = scaled.target_mean + scaled.target_scale * scaled.test.targets
    torch.testing.assert_close(plain.test.targets, original)
    assert torch.equal(plain.train.inputs, scaled.train.inputs) and plain.fingerprint != scaled.fingerprint


def test_hetero1d_has_the_noise_it_states():
    """Planted bug: variance for standard deviation in the noise curve."""
    data = Hetero1D(num_train=4000, num_test=4000, noise_left=0.05, noise_right=0.8, **ALL)
    task = data.load(Path(), 0)
    x = task.input_mean + task.input_scale * torch.cat([task.train.inputs, task.test.inputs])
    y = task.target_mean + task.target_scale * torch.cat([task.train.targets, task.test.targets])
    edges = task.true_noise(torch.tensor([[-3.0], [3.0]])).flatten().tolist()
    assert edges == pytest.approx([0.05, 0.8])
    z = (y - task.truth(x)) / task.true_noise(x)
    for part in z[x < -2], z[x > 2], z:
        n = len(part)
        assert part.mean().abs() < 4 / n**0.5 and (part.std() - 1).abs() < 4 / (2 * n) ** 0.5
    with pytest.raises(UserError) as caught:
        Hetero1D(num_train=9, num_test=9, noise_left=0, noise_right=-1, **ALL).spec()
    assert len(caught.value.problems) == 2


def test_far_points_lie_far_from_both_moons():
    task = TwoMoons(num_train=300, num_test=100, noise=0.2, **ALL).load(Path(), 0)
    moons = task.input_mean + task.input_scale * torch.cat([task.train.inputs, task.test.inputs])
    far = task.input_mean + task.input_scale * task.ood["far"].inputs
    assert torch.cdist(far, moons).min() > 1.0
    assert torch.bincount(task.train.targets).tolist() == [135, 135]


def test_digits_are_split_by_class_and_shuffled_pixel_by_pixel():
    task = Digits(**ALL).load(Path(), 0)
    assert (len(task.train), len(task.val), len(task.test)) == (1294, 144, 359)
    shares = torch.bincount(task.test.targets).double() / torch.bincount(
        torch.cat([task.train.targets, task.val.targets])
    )
    assert ((shares - 0.25).abs() < 0.02).all()
    assert task.train.inputs.min() == 0 and task.train.inputs.max() == 1
    shuffled = task.ood["shuffled"].inputs
    assert torch.equal(shuffled.sort(1).values, task.test.inputs.sort(1).values)
    assert not torch.equal(shuffled, task.test.inputs)
    moved = (shuffled != task.test.inputs).double().mean()
    assert moved > 0.5
    # Each image has an order of its own: pixel 0, always blank, is not blank at one and the same place in all.
    assert (task.test.inputs[:, 0] == 0).all() and not (shuffled == 0).all(0).any()
