"""Checkpoints as other programs write them: each is read as the same network, or refused with what it is.

The files are made here in the shape of checkpoints of torchvision, timm, Lightning, accelerate and other programs.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bnn_runner.errors import UserError
from bnn_runner.training.pretrained import PretrainedWeights, match_weights, read_weights

State = dict[str, Tensor]


def network() -> nn.Module:
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2), head=nn.Linear(2, 3)))


def weights(seed: int = 0) -> State:
    torch.manual_seed(seed)
    return {n: torch.rand_like(t) if t.is_floating_point() else t + 7 for n, t in network().state_dict().items()}


def under(prefix: str, state: State) -> State:
    return {prefix + n: t for n, t in state.items()}


RAW, EMA, LINEAR = weights(0), weights(1), {"weight": torch.ones(1, 4), "bias": torch.ones(1)}

READ: dict[str, tuple[Any, list[str]]] = {
    "a plain state dict": (RAW, []),
    "an OrderedDict with metadata": (OrderedDict(RAW), []),
    "a tensor next to it (imagenet example)": (
        {"epoch": 3, "arch": "x", "state_dict": RAW, "best_acc1": torch.tensor(71.2), "optimizer": {"state": {}}},
        ["the entry 'state_dict'"],
    ),
    "DataParallel": (under("module.", RAW), []),
    "DataParallel in an entry": ({"state_dict": under("module.", RAW), "best_acc1": torch.tensor(1.0)}, ["state_dict"]),
    "AveragedModel with n_averaged": ({"n_averaged": torch.tensor(5), **under("module.", RAW)}, ["n_averaged"]),
    "torch.compile": (under("_orig_mod.", RAW), []),
    "torch.compile of DataParallel": (under("module._orig_mod.", RAW), []),
    "a compiled layer": ({n.replace("conv.", "conv._orig_mod."): t for n, t in RAW.items()}, []),
    "FSDP around a layer": ({n.replace("head.", "_fsdp_wrapped_module.head."): t for n, t in RAW.items()}, []),
    "DataParallel around a layer (VGG)": ({n.replace("conv.", "conv.module."): t for n, t in RAW.items()}, []),
    "Lightning with a criterion and metrics": (
        {
            "epoch": 1,
            "global_step": 10,
            "pytorch-lightning_version": "2.0",
            "state_dict": {
                **under("model.", RAW),
                "criterion.weight": torch.ones(3),
                "train_acc.tp": torch.zeros(3),
                "val_metrics.total": torch.tensor(3),
                "loss_fn.net.0.weight": torch.ones(2, 2),
            },
            "hyper_parameters": {"lr": 0.1},
        },
        ["criterion.weight", "train_acc.tp", "entry 'state_dict/model'"],
    ),
    "another prefix": ({"state_dict": under("student.backbone.", RAW)}, ["state_dict/student.backbone"]),
    "timm with arguments and EMA": (
        {
            "epoch": 9,
            "arch": "r",
            "state_dict": RAW,
            "args": argparse.Namespace(lr=1),
            "state_dict_ema": EMA,
            "metric": 0.8,
        },
        ["also has this network as 'state_dict_ema'", "model.weights_entry=state_dict_ema"],
    ),
    "ema first": ({"model_ema": EMA, "model": RAW}, ["'model_ema'"]),
    "raw and EMA under prefixes": (under("model.", RAW) | under("ema_model.", EMA), ["'ema_model'"]),
    "an EMA that equals the weights": ({"state_dict": RAW, "state_dict_ema": dict(RAW)}, ["the entry 'state_dict'"]),
    "accelerate with numpy numbers": ({"model": RAW, "best": np.float64(0.5), "lr": np.float32(1)}, ["'model'"]),
    "thop's counters": (
        RAW | {"total_ops": torch.zeros(1), "conv.total_params": torch.zeros(1).double()},
        ["total_ops"],
    ),
    "DeepSpeed": ({"module": RAW, "dp_world_size": 1, "ds_config": {}}, ["'module'"]),
    "two levels": ({"checkpoint": {"model": RAW}}, ["'checkpoint.model'"]),
    "an optimizer of tensors": ({"net": RAW, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}, ["'net'"]),
    "no batch counters": ({n: t for n, t in RAW.items() if "num_batches" not in n}, []),
    "an infinite number that is not the network's": ({"state_dict": RAW, "best_loss": torch.tensor(np.inf)}, []),
    "parts in several entries": (
        {
            part: {n.partition(".")[2]: t for n, t in RAW.items() if n.startswith(part)}
            for part in ("conv", "norm", "head")
        },
        [],
    ),
    "half precision": ({n: t.half() if t.is_floating_point() else t for n, t in RAW.items()}, ["float16"]),
}


def read(path: Path, entry: str | None = None) -> tuple[PretrainedWeights, State]:
    found = read_weights(path, network().state_dict(), entry)
    return found, match_weights(network(), found, "model=x")


@pytest.mark.parametrize("case", READ)
def test_read_as_the_same_network(case: str, tmp_path: Path) -> None:
    content, hints = READ[case]
    torch.save(content, tmp_path / "w.pt")
    found, matched = read(tmp_path / "w.pt")
    for name, tensor in RAW.items():
        if name in matched or "num_batches" not in name:
            assert torch.allclose(matched[name].to(tensor.dtype), tensor, atol=1e-3), name
    notes = "\n".join(found.notes)
    assert all(hint in notes for hint in hints), notes
    if case not in ("half precision", "no batch counters"):
        torch.save(RAW, tmp_path / "plain.pt")
        assert found.digest == read(tmp_path / "plain.pt")[0].digest, "another cell for the same network"


@pytest.mark.parametrize(
    ("content", "entry"),
    [
        ({"state_dict": RAW, "state_dict_ema": EMA}, "state_dict_ema"),
        (under("model.", RAW) | under("ema_model.", EMA), "ema_model"),
        ({"generator": RAW, "discriminator": EMA}, "discriminator"),
        ({"state_dict": under("student.", RAW) | under("teacher.", EMA)}, "state_dict/teacher"),
        ({"state_dict": RAW, "callbacks": {"EMA": {"weights": EMA}}}, "callbacks.EMA"),
    ],
)
def test_an_entry_can_be_chosen(content: Any, entry: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pt")
    _, matched = read(tmp_path / "w.pt", entry)
    assert all(torch.equal(matched[n], t) for n, t in EMA.items())
    with pytest.raises(UserError, match="must be an entry of the file; got nothing") as caught:
        read(tmp_path / "w.pt", "nothing")
    assert entry in str(caught.value)


class Own:
    """A class that a checkpoint may hold, as a configuration object."""


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98\n")


def folder(path: Path) -> None:
    path.mkdir()
    save_file(RAW, path / "model.safetensors")
    (path / "optimizer.bin").write_bytes(b"x")


def distributed(path: Path) -> None:
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"x")


def script(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        torch.jit.save(torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2)), path)


REFUSED: dict[str, tuple[str, Callable[[Path], Any], list[str]]] = {
    "LFS": ("w.safetensors", pointer, ["Git LFS pointer", "git lfs pull"]),
    "LFS .pt": ("w.pt", pointer, ["Git LFS pointer"]),
    "a folder": ("out", folder, ["is a folder", "model.weights=", "out/model.safetensors"]),
    "a distributed folder": ("out", distributed, ["dcp_to_torch"]),
    "an empty folder": ("out", Path.mkdir, ["without weights"]),
    "an empty file": ("w.pt", Path.touch, ["is empty"]),
    "a web page": ("w.pt", lambda p: p.write_text("<!DOCTYPE html>"), ["web page"]),
    "JSON": ("w.pt", lambda p: p.write_text('{"a": 1}'), ["JSON"]),
    "HDF5": ("w.h5", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), ["HDF5"]),
    "gzip": ("w.pt.gz", lambda p: p.write_bytes(b"\x1f\x8b123"), ["gzip"]),
    "ONNX": ("net.onnx", lambda p: p.write_bytes(b"\x08\x07\x12\x07pytorch"), [".onnx file"]),
    "npz": ("w.npz", lambda p: np.savez(p, a=np.ones(2)), [".npz file"]),
    "an index without its files": (
        "model.safetensors.index.json",
        lambda p: p.write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors"}})),
        ["is an index", "model-1-of-2.safetensors"],
    ),
    "a broken index": ("model.safetensors.index.json", lambda p: p.write_text("{"), ["as the index"]),
    "a class": (
        "w.ckpt",
        lambda p: torch.save({"state_dict": RAW, "config": Own()}, p),
        ["Own", "python -c", "c['state_dict']", "weights_only=False"],
    ),
    "a whole network": ("w.pt", lambda p: torch.save(nn.Linear(2, 1), p), ["c.state_dict()"]),
    "a plain pickle": ("w.pkl", lambda p: p.write_bytes(pickle.dumps({"a": 1})), ["w.pkl"]),
    "TorchScript": ("w.pt", script, ["TorchScript", "torch.jit.load"]),
    "no tensors": ("w.pt", lambda p: torch.save({"lr": 1, "steps": [1]}, p), ["contains lr, steps"]),
    "two networks": (
        "w.pt",
        lambda p: torch.save({"gen": RAW, "dis": EMA}, p),
        ["dis, gen", "model.weights_entry=dis"],
    ),
    "student and teacher": (
        "w.pt",
        lambda p: torch.save(under("student.", RAW) | under("teacher.", EMA), p),
        ["student, teacher"],
    ),
    "a layer more": (
        "w.pt",
        lambda p: torch.save(RAW | {"extra.weight": torch.ones(2)}, p),
        ["Not in the network: extra.weight"],
    ),
    "a layer more next to the prefix": (
        "w.pt",
        lambda p: torch.save(under("model.", RAW) | {"head2.weight": torch.ones(2)}, p),
        ["Not in the network: head2.weight", "model.weights_entry"],
    ),
    "a scale more": ("w.pt", lambda p: torch.save(RAW | {"logit_scale": torch.tensor(2.0)}, p), ["logit_scale"]),
    "sparse": ("w.pt", lambda p: torch.save(RAW | {"head.bias": torch.ones(3).to_sparse()}, p), ["sparse"]),
    "NaN": ("w.pt", lambda p: torch.save(RAW | {"head.bias": torch.full((3,), np.nan)}, p), ["head.bias", "NaN"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_for_what_it_is(case: str, tmp_path: Path) -> None:
    name, write, hints = REFUSED[case]
    write(tmp_path / name)
    with pytest.raises(UserError) as caught:
        read(tmp_path / name)
    message = str(caught.value)
    assert all(hint in message for hint in hints), message


def test_the_line_that_saves_a_file_again_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"state_dict": RAW, "config": Own()}, tmp_path / "w.ckpt")
    with pytest.raises(UserError) as caught:
        read(tmp_path / "w.ckpt")
    line = re.search(r'python -c "(.*)"', str(caught.value))
    assert line is not None
    monkeypatch.chdir(tmp_path)
    exec(line[1], {})
    assert torch.equal(read(tmp_path / "weights.pt")[1]["conv.weight"], RAW["conv.weight"])


def test_shards_are_read_together(tmp_path: Path) -> None:
    names = sorted(RAW)
    for i, part in enumerate((names[:3], names[3:])):
        save_file({n: RAW[n] for n in part}, tmp_path / f"model-{i}.safetensors")
    index = {"metadata": {}, "weight_map": {n: f"model-{int(i >= 3)}.safetensors" for i, n in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, matched = read(tmp_path / "model.safetensors.index.json")
    assert all(torch.equal(matched[n], t) for n, t in RAW.items())


def test_a_part_of_another_network_is_not_taken(tmp_path: Path) -> None:
    """Planted bug: a single linear layer finds its two names in any layer of any network."""
    layers = nn.Sequential(nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 1)).state_dict()
    torch.save(layers, tmp_path / "w.pt")
    module = nn.Linear(4, 1)
    with pytest.raises(UserError, match="Not in the network: 2"):
        match_weights(module, read_weights(tmp_path / "w.pt", module.state_dict()), "model=x")


def test_cases_are_counted() -> None:
    assert len(READ) + len(REFUSED) >= 50
