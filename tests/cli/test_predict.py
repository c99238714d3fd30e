"""bnn-predict and opening runs again: what is predicted for new points, and what is refused."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import bnn_runner
from bnn_runner.api import Run
from bnn_runner.cli.open_run import find_run
from bnn_runner.cli.predict import main
from bnn_runner.data.table_file import read_table
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.runs.predictor import mixture_quantile

SMALL = {"allow": ["tests"], "schedule": "adam", "schedule.epochs": 30, "schedule.batch_size": 20, "schedule.lr": 0.02}
SMALL |= {"model": "mlp", "model.hidden": [6], "eval.num_draws": 40, "metric": ["marginal"], "figures": False}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    (folder / "conf" / "data").mkdir(parents=True)
    for name in ("Boats", "Tiles"):
        text = f"# own data\n_target_: tests.user_data.{name}\nval_fraction: 0.1\n"
        (folder / "conf" / "data" / f"{name.lower()}.yaml").write_text(text)
    return folder


def run_small(root: Path, data: str, method: str, **more: object) -> Run:
    words = SMALL | {"data": data, "method": method, "output_dir": str(root / "out")} | more
    return bnn_runner.run(words, config_dir=root / "conf", quiet=True)


@pytest.fixture(scope="module")
def boats(root: Path) -> Run:
    return run_small(root, "boats", "laplace", save_posterior=True)


@pytest.fixture(scope="module")
def tiles(root: Path) -> Run:
    return run_small(root, "tiles", "ensemble", **{"method.size": 3})


ROWS = pd.DataFrame(
    {
        "length": [6.5, 12.25, 9.0],
        "colour": ["red", "blue", "green"],
        "speed": [101.5, 95.0, 99.0],
        "owner": ["a", "b", "c"],
    }
)


def predicted(run: Run, data: Path, out: Path, *words: str) -> pd.DataFrame:
    assert main([str(run.folder), "--data", str(data), "--out", str(out), "--allow", "tests", *words]) == 0
    return pd.read_csv(out)


def refused(run: Run, data: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([str(run.folder), "--data", str(data), "--allow", "tests", *words]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told


# ------------------------------------------------------------------------------------- tables


def test_columns_are_found_by_name_in_any_order_and_spelling_of_csv(
    boats: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted bugs: columns by place although they have names; inputs that skip the run's standardisation."""
    ROWS.to_csv(tmp_path / "plain.csv", index=False)
    reordered = ROWS[["owner", "speed", "length", "colour"]]
    reordered.to_csv(tmp_path / "semi.csv", index=False, sep=";", decimal=",", encoding="utf-8-sig")
    plain = predicted(boats, tmp_path / "plain.csv", tmp_path / "a.csv")
    assert "ignored columns: owner" in capsys.readouterr().err
    pd.testing.assert_frame_equal(predicted(boats, tmp_path / "semi.csv", tmp_path / "b.csv"), plain)
    assert list(plain.columns[:4]) == ["row", "mean_price", "sd_price", "aleatoric_sd_price"]
    codes = [[6.5, 2, 101.5], [12.25, 0, 95.0], [9.0, 1, 99.0]]
    np.testing.assert_allclose(boats.predict(codes), plain.iloc[:, 1:], rtol=1e-6)
    np.testing.assert_allclose(boats.predict(ROWS), plain.iloc[:, 1:], rtol=1e-6)
    assert (plain.mean_price - (1000 * ROWS.length + 200 * np.array([2, 0, 1]))).abs().max() < 2500, "original units"


def test_predictions_are_those_the_run_scored(boats: Run) -> None:
    """The test points, given again in original units, get the evaluation's own means and variances (in parts)."""
    task, test = boats.task, boats.evaluation.test
    scale, shift = task.input_scale, task.input_mean
    hot = task.test.inputs.double() * scale.double() + shift.double()
    original = torch.stack([hot[:, 0], hot[:, 1:4].argmax(1).double(), hot[:, 4]], 1)
    table = boats.predict(original)
    assert test.means is not None and test.variances is not None
    np.testing.assert_allclose(table.mean_price, test.means.mean(0)[:, 0], rtol=1e-4)
    np.testing.assert_allclose(table.epistemic_sd_wear, test.means.std(0, correction=0)[:, 1], rtol=1e-3)
    noise = test.variances[0, 0].sqrt()
    np.testing.assert_allclose(table.aleatoric_sd_price, noise[0], rtol=1e-4)
    total = table.aleatoric_sd_price**2 + table.epistemic_sd_price**2
    np.testing.assert_allclose(table.sd_price**2, total, rtol=1e-9)
    within = (table.lower_95_price < table.mean_price) & (table.mean_price < table.upper_95_price)
    assert within.all()


def test_quantiles_of_a_mixture() -> None:
    """Two separated parts of unequal weight: the quantile lies in the part that holds it. Planted bug: mean ± 2 sd."""
    means = torch.tensor([0.0, 100.0]).double().reshape(2, 1, 1)
    sds = torch.tensor([1.0, 2.0]).double().reshape(2, 1, 1)
    log_weight = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    # 0.45 is the middle of the first part (all of whose weight is 0.9); 0.95 the middle of the second.
    assert float(mixture_quantile(means, sds, log_weight, 0.45)) == pytest.approx(0.0, abs=1e-6)
    assert float(mixture_quantile(means, sds, log_weight, 0.95)) == pytest.approx(100.0, abs=1e-6)


def test_tables_that_do_not_fit_are_refused_by_name(
    boats: Run, tiles: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "t.csv"
    for text, told in {
        "length,colour,sped\n1,red,2\n": "is missing the input column speed. Did you mean sped?",
        "length,colour,speed\n3,pink,4\n": "line 2: column colour must be one of blue, green, red; got 'pink'",
        "length,colour,speed\n1,red,fast\n": "line 2: column speed must be a number; got 'fast'",
        "length,colour,speed\n4,red,?\n": "line 2: no value in speed",
        "length,colour,speed\n1,red,2\n4,red\n": "line 3 must have 3 cells, as the header; got 2",
        "length,length,speed\n1,2,2\n": "column names must be unique; got 'length' twice",
        "1,2\n3,4\n": "must have 3 columns in the order of data=boats: length, colour, speed; got 2",
        "length,colour,speed\n": "must have one row per point",
        "": "must have one row per point",
    }.items():
        data.write_text(text)
        assert told in refused(boats, data, capsys), text
    data.write_bytes("length\n\x81\n".encode("latin-1"))
    assert "must be text in UTF-8" in refused(boats, data, capsys)
    ROWS.to_csv(data, index=False)
    assert "got a table" in refused(tiles, data, capsys)
    assert "does not exist" in refused(boats, tmp_path / "absent.csv", capsys)
    assert "--level must be between 0 and 1" in refused(boats, data, capsys, "--level", "2")
    assert "--draws must be at least 1" in refused(boats, data, capsys, "--draws", "0")


def test_rows_that_do_not_fit_are_marked_and_the_others_predicted(
    boats: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted bugs: predictions under the wrong rows; ids that stay with the rows that fit."""
    ROWS.to_csv(tmp_path / "plain.csv", index=False)
    plain = predicted(boats, tmp_path / "plain.csv", tmp_path / "a.csv")
    lines = ["boat_id,length,colour,speed", "b7,6.5,red,101.5", "b3,3,pink,4", "b9,1,red,fast", "b1,12.25,blue,95"]
    (tmp_path / "new.csv").write_text("\n".join([*lines, "b2,,red,3", "b4,9,green,99"]))
    table = predicted(boats, tmp_path / "new.csv", tmp_path / "b.csv")
    said = capsys.readouterr().err
    assert "3 of 6 rows not predicted, see their column note: line 3: column colour must be one of" in said
    assert list(table.columns[:3]) == ["row", "boat_id", "mean_price"]
    assert table.boat_id.tolist() == ["b7", "b3", "b9", "b1", "b2", "b4"] and table.row.tolist() == [1, 2, 3, 4, 5, 6]
    fit = table[table.note.isna()]
    assert fit.boat_id.tolist() == ["b7", "b1", "b4"]
    np.testing.assert_allclose(fit[plain.columns[1:]], plain.iloc[:, 1:], rtol=1e-6)
    assert table.mean_price.isna().tolist() == [False, True, True, False, True, False]
    assert table.note[1] == "column colour must be one of blue, green, red; got 'pink'"
    frame = ROWS.set_index("owner").assign(colour=["red", "pink", "green"])
    marked = boats.predict(frame)
    assert marked.index.tolist() == ["a", "b", "c"] and marked.mean_price.isna().tolist() == [False, True, False]


def test_a_user_s_own_csv_from_training_to_prediction(root: Path, tmp_path: Path) -> None:
    """data=csv names its columns and texts; a missing cell is filled where training was told to fill."""
    length, colour = np.linspace(1, 9, 60), np.array(["red", "blue", "red"] * 20)
    homes = pd.DataFrame({"length": length, "colour": colour, "price": 10 * length + 30 * (colour == "red")})
    homes.to_csv(root / "homes.csv", index=False)
    data = {"data.path": str(root / "homes.csv"), "data.target": "price", "data.missing": "mean"}
    run = run_small(root, "csv", "map", **data, **{"schedule.epochs": 200})
    (tmp_path / "new.csv").write_text("colour,length\nred,3\nblue,3\nred,\n")
    table = predicted(run, tmp_path / "new.csv", tmp_path / "out.csv")
    assert table["mean"][0] - table["mean"][1] == pytest.approx(30, abs=8)
    assert table["mean"][2] == pytest.approx(80, abs=12), "filled by the mean length, 5"


def test_a_table_without_names_goes_by_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1.5 2e3   -4\n 0 1 nan\n\n")
    table = read_table(tmp_path / "a.txt")
    assert table.header is None and table.rows == (("1.5", "2e3", "-4"), ("0", "1", "nan"))
    (tmp_path / "b.csv").write_text('id,"a, b"\n"1","x\ny"\n2,z\n')
    table = read_table(tmp_path / "b.csv")
    assert table.header == ("id", "a, b") and table.rows[0] == ("1", "x\ny") and table.lines == (2, 4)


# ------------------------------------------------------------------------------------- images


def test_arrays_and_image_files_are_the_same_points(
    tiles: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted bugs: an axis swapped; pixels that skip the run's scaling; probabilities under other labels."""
    pixels = tiles.task.test.inputs[:6].numpy()
    np.savez(tmp_path / "first.npz", x=pixels)
    np.savez(tmp_path / "last.npz", pixels.transpose(0, 2, 3, 1))
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    for i, image in enumerate(pixels):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / ("sub" if i > 3 else ".") / f"{i}.png")
    (folder / "notes.txt").write_text("no image")
    first = predicted(tiles, tmp_path / "first.npz", tmp_path / "1.csv")
    last = predicted(tiles, tmp_path / "last.npz", tmp_path / "2.csv")
    files = predicted(tiles, folder, tmp_path / "3.csv")
    one = predicted(tiles, folder / "2.png", tmp_path / "4.csv")
    pd.testing.assert_frame_equal(first, last)
    pd.testing.assert_frame_equal(first.iloc[:, 1:], files.iloc[:, 1:])
    assert list(files.file) == ["0.png", "1.png", "2.png", "3.png", "sub/4.png", "sub/5.png"]
    np.testing.assert_allclose(one.p_left, files.p_left[2:3], rtol=1e-5)
    assert "ignored: 1 files that are not images" in capsys.readouterr().err

    test = tiles.evaluation.test
    assert test.mean_probs is not None and test.mean_entropy is not None
    np.testing.assert_allclose(first[["p_left", "p_right"]], test.mean_probs[:6], atol=1e-5)
    assert list(first.predicted) == [("left", "right")[k] for k in test.mean_probs[:6].argmax(1)]
    np.testing.assert_allclose(first.aleatoric_entropy, test.mean_entropy[:6], atol=1e-5)
    np.testing.assert_allclose(first.total_entropy, first.aleatoric_entropy + first.mutual_information, atol=1e-6)


def test_images_that_do_not_fit_are_refused(
    tiles: Run, boats: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "large.png")
    assert "large.png must be 6 x 8 pixels" in refused(tiles, tmp_path / "large.png", capsys)
    assert "got images" in refused(boats, tmp_path / "large.png", capsys)
    (tmp_path / "broken.png").write_bytes(b"no")
    assert "as an image" in refused(tiles, tmp_path / "broken.png", capsys)
    (tmp_path / "empty").mkdir()
    assert "contains no images" in refused(tiles, tmp_path / "empty", capsys)
    np.savez(tmp_path / "float.npz", x=np.zeros((2, 3, 8, 6)))
    assert "must hold bytes (uint8, 0 to 255)" in refused(tiles, tmp_path / "float.npz", capsys)
    np.savez(tmp_path / "shape.npz", x=np.zeros((2, 3, 9, 9), np.uint8))
    assert "[3, 9, 9]" in refused(tiles, tmp_path / "shape.npz", capsys)
    np.savez(tmp_path / "two.npz", a=np.zeros(2), b=np.zeros(2))
    assert "must contain an array x" in refused(tiles, tmp_path / "two.npz", capsys)
    np.savez(tmp_path / "objects.npz", x=np.array([{}, 1], object))
    assert "as .npz" in refused(tiles, tmp_path / "objects.npz", capsys)
    np.savez(tmp_path / "rows.npz", x=np.zeros((2, 7)))
    assert "must have shape [points, 3] (length, colour, speed)" in refused(boats, tmp_path / "rows.npz", capsys)


# ------------------------------------------------------------------------------ finding a run


def test_a_run_is_found_by_folder_hash_or_latest(
    boats: Run, tiles: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = root / "out"
    code = boats.folder.name.rpartition("-")[2]
    assert (
        find_run(code[:6], out) == find_run(boats.folder.name, out) == find_run(str(boats.folder), out) == boats.folder
    )
    os.utime(tiles.folder / "DONE", (2e9, 2e9))
    assert find_run("latest", out) == tiles.folder
    for name, told in (("0-", "runs start with"), ("zzz", "There is no run")):
        with pytest.raises(UserError, match=told):
            find_run(name, out)
    with pytest.raises(UserError, match="no finished runs"):
        find_run("latest", root / "nowhere")
    assert main([str(root), "--data", "x.csv"]) == 2
    assert "must be the folder of a run" in capsys.readouterr().err


def test_a_run_that_is_not_finished_says_how_to_finish_it(root: Path) -> None:
    with pytest.raises(RunFailed, match="diverged"):
        run_small(root, "boats", "map", **{"schedule": "sgd", "schedule.lr": 1e9})
    [failed] = root.glob("out/runs/boats/mlp/map/*/FAILED")
    with pytest.raises(UserError, match=r"not finished .failed: .*diverged.* To finish it, run: bnn-run "):
        bnn_runner.load(failed.parent)


# ---------------------------------------------------------------------------- saved or fitted again


def test_saved_and_fitted_again_are_the_same_posterior(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit. A run without its posterior gets it by the same command with save_posterior=true."""
    data = root / "rows.csv"
    ROWS.to_csv(data, index=False)
    plain = run_small(root, "boats", "laplace_kfac")
    assert plain.posterior_source == "fitted again"
    before = predicted(plain, data, root / "before.csv")
    assert "fitted again to the cached network" in capsys.readouterr().err
    kept = run_small(root, "boats", "laplace_kfac", save_posterior=True)
    assert kept.folder == plain.folder and kept.posterior_source == "saved"
    again = bnn_runner.load(kept.folder, allow=["tests"], cache_dir=root / "nowhere", quiet=True)
    x = again.task.test.inputs
    assert torch.equal(again.draws(4)(x), plain.draws(4)(x)), "the saved one needs no network from the cache"
    pd.testing.assert_frame_equal(predicted(kept, data, root / "after.csv"), before, check_exact=True)
    assert "read from the run" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"missing from .*nowhere. Pass cache_dir=, or run it again: bnn-run "):
        bnn_runner.load(kept.folder, allow=["tests"], cache_dir=root / "nowhere", quiet=True).network


def test_a_given_network_s_run_opens_without_its_file(root: Path, boats: Run) -> None:
    state = {n: t.clone() for n, t in boats.network.parameters.items()}
    torch.save(state, root / "given.pt")
    run = run_small(root, "boats", "laplace", **{"model.weights": str(root / "given.pt")})
    (root / "given.pt").unlink()
    opened = bnn_runner.load(run.folder, allow=["tests"], quiet=True)
    assert all(torch.equal(opened.network.parameters[n], t) for n, t in state.items())
    assert "mean_price" in opened.predict(ROWS)


# ------------------------------------------------------------------------------------ from Python


def test_mistakes_and_failures_are_exceptions_and_nothing_is_left_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a thread, which does not handle signals."""
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with pytest.raises(UserError, match="Did you mean gap1d"):
        bnn_runner.run(["data=gap1"], quiet=True)
    with pytest.raises(UserError, match="must be a list of strings"):
        bnn_runner.run("data=gap1d", quiet=True)
    with pytest.raises(UserError, match=r"Use bnn_runner\.sweep"):
        bnn_runner.run(["replicates=2"], quiet=True)
    found: list[Run] = []
    words = {"method": "map", "debug": "fast", "metric": ["rmse"], "figures": False}
    worker = threading.Thread(target=lambda: found.append(bnn_runner.run(words, quiet=True)))
    worker.start()
    worker.join()
    assert found[0].scores.metric.tolist() == ["rmse"] and "map" in repr(found[0])
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    with pytest.raises(RunFailed, match=r"schedule\.lr=1000000000.*diverged"):
        swept = ["debug=fast", "method=map", "schedule=sgd", "schedule.lr=0.01,1e9", "figures=false"]
        bnn_runner.sweep(swept, quiet=True)
    assert len(list(tmp_path.glob("outputs/debug/runs/gap1d/mlp/map/*/DONE"))) == 2


def test_a_saved_posterior_predicts_without_its_data(root: Path, tmp_path: Path) -> None:
    """Scaling, categories, column order, filled values and codes of missing ones are those of the training table."""
    length, colour = np.linspace(1, 9, 60), np.array(["red", "blue", "red"] * 20)
    homes = pd.DataFrame({"id": range(60), "length": length, "colour": colour})
    homes["price"] = 10 * length + 30 * (colour == "red")
    homes.to_csv(root / "moved.csv", index=False, sep=";", decimal=",")
    data = {"data.path": str(root / "moved.csv"), "data.target": "price", "data.missing": "mean"}
    run = run_small(root, "csv", "laplace", save_posterior=True, **data, **{"data.missing_codes": [-1]})
    (tmp_path / "new.csv").write_text("colour;id;length\nred;x7;3,250\nblue;x8;-1\npink;x9;1,5\n")
    before = predicted(run, tmp_path / "new.csv", tmp_path / "a.csv")
    (root / "moved.csv").unlink()
    after = predicted(run, tmp_path / "new.csv", tmp_path / "b.csv")
    pd.testing.assert_frame_equal(before, after, check_exact=True)
    assert after.id.tolist() == ["x7", "x8", "x9"] and after["mean"].isna().tolist() == [False, False, True]
    config = (run.folder / "config.yaml").read_text()  # as written by a version without one of the keys
    (run.folder / "config.yaml").write_text("".join(x for x in config.splitlines(True) if "thousands" not in x))
    again = bnn_runner.load(run.folder, allow=["tests"], quiet=True)
    np.testing.assert_allclose(
        again.predict(pd.DataFrame({"colour": ["red"], "length": [3.25]}))["mean"], after["mean"][0]
    )
    with pytest.raises(UserError, match=r"Could not read data.path=.*moved.csv"):
        again.task
