"""What shapes what: the fields that enter the key of a trained network, and those that enter a cell's id.

Every field of the configuration stands in exactly one of these lists, by its longest dotted
prefix; a test walks the configuration and fails for one that stands in none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from bnn_runner.config.groups import flatten

RESULTS_VERSION = 7
"""Raised when the same configuration would train other weights or give other draws than before."""

TRAINING = ("data", "model", "schedule", "augment", "prior", "likelihood", "precision", "threads", "seed")
POSTERIOR = ("method", "hyper")
EVALUATION = ("eval", "data.test_size")
NEVER = (
    "metric",
    "logger",
    "device",
    "output_dir",
    "cache_dir",
    "data_dir",
    "time_limit",
    "memory_gb",
    "force",
    "plan_only",
    "retry_failed",
    "fail_fast",
    "objective",
    "prepare",
    "stack",
    "compile",
    "figures",
    "save_posterior",
    "allow",
    "size",
    "replicates",
    "model.weights",
)
"""`threads` counts only where it is set: results are bit-identical at equal threads only.
`model.weights` are places; their content enters by `model.weights_digest`, which is added when they are read."""

LISTS = {"training": TRAINING, "posterior": POSTERIOR, "evaluation": EVALUATION, "never": NEVER}


def list_of(key: str) -> str | None:
    """The list a dotted key belongs to, by its longest prefix there; None if it is on none."""
    found = [
        (len(p), name) for name, prefixes in LISTS.items() for p in prefixes if key == p or key.startswith(p + ".")
    ]
    return max(found)[1] if found else None


def select(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The flattened fields that stand on the named lists; a class of our own enters by its name, not by its module."""
    return {key: _class_name(key, value) for key, value in flatten(config).items() if list_of(key) in names}


def _class_name(key: str, value: Any) -> Any:
    """'MLP' for the value 'bnn_runner.models.mlp.MLP' of a `_target_`, so that a moved module orphans no run."""
    ours = key.rpartition(".")[2] == "_target_" and isinstance(value, str) and value.startswith("bnn_runner.")
    return value.rpartition(".")[2] if ours else value


def digest(value: Any) -> str:
    """32 hexadecimal digits of the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def training_key(
    config: Mapping[str, Any], kind: str, fingerprint: str, lane_seed: int, extras: tuple[tuple[str, Any], ...]
) -> str:
    """Key of a trained network: content of the data, model, schedule, prior, noise rule, precision, lane seed.

    The data enter by the fingerprint of what a training sees, not by their settings, so that two
    ways to the same training set share a network. The run's seed enters by the lane seed.
    """
    fields = select(config, "training")
    kept = {k: v for k, v in fields.items() if not k.startswith("data.") and k != "seed"}
    if kind == "classification":
        kept = {k: v for k, v in kept.items() if not k.startswith("likelihood.")}
    return digest(
        {
            "fields": kept,
            "data": fingerprint,
            "lane": lane_seed,
            "extras": list(extras),
            "results_version": RESULTS_VERSION,
        }
    )


def cell_hash(config: Mapping[str, Any], uses_hyper: bool, finite: bool) -> str:
    """Id of a cell: training, posterior and evaluation fields, less a rule or number of draws that cannot matter."""
    fields = select(config, "training", "posterior", "evaluation")
    if not uses_hyper:
        fields = {k: v for k, v in fields.items() if not k.startswith("hyper.")}
    if finite:
        fields.pop("eval.num_draws", None)
    return digest({"fields": fields, "results_version": RESULTS_VERSION})


def metrics_digest(config: Mapping[str, Any]) -> str:
    """Changes when other metrics, or other settings of them, are asked for."""
    return digest({k: v for k, v in flatten(config).items() if k.startswith("metric.")})
