"""Evaluations on disk: plain tensors (safetensors) and one JSON file.

Each file is written under a temporary name, flushed and renamed; the JSON file, which holds a
digest of the tensors, comes last. A truncated file, or two files that do not belong together, are detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from bnn_runner.errors import UserError
from bnn_runner.runtime.files import write_atomically, write_json
from bnn_runner.scoring import Evaluation, GaussianJoint, SplitEvaluation

TENSORS, FACTS = "evaluation.safetensors", "evaluation.json"
FORMAT = 2
"""2: with `Evaluation.unavailable`. Tensors added since are optional: `exact_loglik`, `gaussian_joint/noise`, those of
the centre."""
_FIELDS = (
    "ids",
    "loglik",
    "targets",
    "mean_probs",
    "mean_entropy",
    "means",
    "variances",
    "epistemic",
    "exact_loglik",
)


class DamagedEvaluation(UserError):
    """A saved evaluation that is missing, truncated, changed, or of another format."""


def save(evaluation: Evaluation, folder: Path) -> None:
    """Write `evaluation` into `folder` (created if missing), replacing an earlier one."""
    tensors: dict[str, Tensor] = {"log_weights": evaluation.log_weights}
    tensors |= _split_tensors("splits", evaluation.splits)
    if evaluation.centre is not None:
        tensors |= _split_tensors("centre", evaluation.centre.splits)
    if evaluation.gaussian_joint is not None:
        tensors["gaussian_joint/mean"] = evaluation.gaussian_joint.mean
        tensors["gaussian_joint/covariance"] = evaluation.gaussian_joint.covariance
        if evaluation.gaussian_joint.noise is not None:
            tensors["gaussian_joint/noise"] = evaluation.gaussian_joint.noise
    # clone: safetensors refuses tensors that share memory
    data = tensors_to_bytes({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    facts = {
        "format": FORMAT,
        "kind": evaluation.kind,
        "predictive": evaluation.predictive,
        "finite": evaluation.finite,
        "has_joint": evaluation.has_joint,
        "temperature": evaluation.temperature,
        "splits": list(evaluation.splits),
        "centre": [] if evaluation.centre is None else list(evaluation.centre.splits),
        "unavailable": dict(evaluation.unavailable),
        "notes": list(evaluation.notes),
        "digest": _digest(data),
    }
    write_atomically(folder / TENSORS, lambda f: f.write(data))
    write_json(folder / FACTS, facts)


def load(folder: Path) -> Evaluation:
    """The evaluation saved in `folder`, on the CPU.

    Raises:
        DamagedEvaluation: it is missing, damaged, or of another format.
    """
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_bytes())
        data = (folder / TENSORS).read_bytes()
    except FileNotFoundError as error:
        raise _damaged(folder, f"{Path(error.filename).name} is missing") from None
    except ValueError:  # not JSON, or not text
        raise _damaged(folder, f"{FACTS} is not valid JSON") from None
    if not isinstance(facts, dict):
        raise _damaged(folder, f"{FACTS} does not hold a mapping")
    if (written := facts.get("format")) != FORMAT:
        raise DamagedEvaluation(
            f"Could not read the evaluation saved in {folder}: it has format {written}, and this version reads format "
            f"{FORMAT}. Run the cell again with force=true."
        )
    if facts.get("digest") != _digest(data):
        raise _damaged(folder, f"{TENSORS} does not match {FACTS}")
    try:
        tensors = tensors_from_bytes(data)
        splits = _splits("splits", facts["splits"], tensors)
        centre = _splits("centre", facts.get("centre", []), tensors)
        joint = None
        if "gaussian_joint/mean" in tensors:
            mean, covariance = tensors["gaussian_joint/mean"], tensors["gaussian_joint/covariance"]
            joint = GaussianJoint(mean, covariance, tensors.get("gaussian_joint/noise"))
        kind, temperature = facts["kind"], facts["temperature"]
        return Evaluation(
            kind=kind,
            predictive=facts["predictive"],
            finite=facts["finite"],
            has_joint=facts["has_joint"],
            log_weights=tensors["log_weights"],
            splits=splits,
            gaussian_joint=joint,
            temperature=temperature,
            unavailable=facts["unavailable"],
            centre=Evaluation(kind, "draws", True, True, torch.zeros(1), centre, temperature=temperature)
            if centre
            else None,
            notes=tuple(facts["notes"]),
        )
    except (SafetensorError, KeyError, TypeError) as error:
        raise _damaged(folder, str(error)) from None


def _split_tensors(prefix: str, splits: Mapping[str, SplitEvaluation]) -> dict[str, Tensor]:
    found = {f"{prefix}/{name}/{field}": getattr(split, field) for name, split in splits.items() for field in _FIELDS}
    return {key: value for key, value in found.items() if value is not None}


def _splits(prefix: str, names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, SplitEvaluation]:
    return {
        name: SplitEvaluation(**{f: tensors.get(f"{prefix}/{name}/{f}") for f in _FIELDS})  # type: ignore[arg-type]
        for name in names
    }


def _damaged(folder: Path, why: str) -> DamagedEvaluation:
    return DamagedEvaluation(
        f"Could not read the evaluation saved in {folder}: {why}. Run the cell again with force=true."
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
