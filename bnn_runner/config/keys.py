"""Which fields of the configuration enter the key of a trained network, and which enter the id of a cell.

Every field belongs to exactly one of the lists below, the one with its longest dotted prefix. A test walks the
configuration and fails for a field that belongs to none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from bnn_runner.config.groups import flatten

TRAINING_VERSION = 7
"""Increased whenever the same configuration trains different weights than before. Raise RESULTS_VERSION with it."""
RESULTS_VERSION = 8
"""Increased whenever the same weights give a different posterior, different draws or other rows than before.

Cells of an earlier version are run again; their trained networks stay valid as long as `TRAINING_VERSION` does.
"""

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
    "model.weights_entry",
)
"""Fields that change no result.

`threads` is not one of them: results are bit-identical only for equal numbers of threads, so it counts if it is set.
`model.weights` and `model.weights_entry` say where weights are; their content enters through `model.weights_digest`,
which is added when they are read.
"""

LISTS = {"training": TRAINING, "posterior": POSTERIOR, "evaluation": EVALUATION, "never": NEVER}


def list_of(key: str) -> str | None:
    """Returns the name of the list that holds the longest prefix of a dotted key; None if no list does."""
    matches = [
        (len(p), name) for name, prefixes in LISTS.items() for p in prefixes if key == p or key.startswith(p + ".")
    ]
    return max(matches)[1] if matches else None


def select(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns the fields of a configuration that belong to the named lists, by their dotted keys.

    Classes of this package are replaced by their names, without the module.
    """
    return {key: _class_name(key, value) for key, value in flatten(config).items() if list_of(key) in names}


def _class_name(key: str, value: Any) -> Any:
    """Shortens a `_target_` 'bnn_runner.models.mlp.MLP' to 'MLP', so that moving a module invalidates no key."""
    ours = key.rpartition(".")[2] == "_target_" and isinstance(value, str) and value.startswith("bnn_runner.")
    return value.rpartition(".")[2] if ours else value


def digest(value: Any) -> str:
    """Returns a hash of the canonical JSON of `value`, in 32 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def training_key(
    config: Mapping[str, Any], kind: str, fingerprint: str, lane_seed: int, extras: tuple[tuple[str, Any], ...]
) -> str:
    """Returns the key of a trained network: a hash of everything that affects its training.

    The data enter through the fingerprint of the training and validation parts, not through their settings, so that
    two ways to the same training set share a network. The run's seed enters through the lane seed.

    Args:
        config: The resolved configuration; its fields in `TRAINING` count.
        kind: 'classification' or 'regression'; fields of the likelihood count only for regression.
        fingerprint: Hash of the content of the data.
        lane_seed: Seed of this network.
        extras: Further (name, value) pairs, as the method's training spec requires.
    """
    fields = {k: v for k, v in select(config, "training").items() if not k.startswith("data.") and k != "seed"}
    if kind == "classification":
        fields = {k: v for k, v in fields.items() if not k.startswith("likelihood.")}
    return digest(
        {
            "fields": fields,
            "data": fingerprint,
            "lane": lane_seed,
            "extras": list(extras),
            "training_version": TRAINING_VERSION,
        }
    )


def cell_hash(config: Mapping[str, Any], uses_hyper: bool, finite: bool) -> str:
    """Returns the id of a cell: a hash of its training, posterior and evaluation fields.

    Args:
        config: The resolved configuration.
        uses_hyper: Whether the method uses the hyperparameter rule; if not, the rule does not count.
        finite: Whether the posterior is a finite set of networks; if so, the number of draws does not count.
    """
    fields = select(config, "training", "posterior", "evaluation")
    if not uses_hyper:
        fields = {k: v for k, v in fields.items() if not k.startswith("hyper.")}
    if finite:
        fields.pop("eval.num_draws", None)
    return digest({"fields": fields, "results_version": RESULTS_VERSION})


def metrics_digest(config: Mapping[str, Any]) -> str:
    """Returns a hash of the selected metrics and their settings."""
    return digest({k: v for k, v in flatten(config).items() if k.startswith("metric.")})
