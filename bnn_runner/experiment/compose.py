"""From overrides to the resolved configuration of one run. Hydra composes configurations only here."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bnn_runner.config.groups import BLOCKS, packaged_conf
from bnn_runner.config.overrides import quote
from bnn_runner.config.recommend import Expanded
from bnn_runner.config.run_config import RunConfig
from bnn_runner.config.settings import anchor
from bnn_runner.config.validate import check
from bnn_runner.errors import UserError


def resolve_run(overrides: Sequence[str], config_dir: Path | str | None = None, start: Path | None = None) -> RunConfig:
    """Checks, expands and composes the overrides of one run.

    Args:
        overrides: As typed, without sweeps.
        config_dir: A folder with further choices.
        start: The folder to which relative paths refer; the current folder by default.

    Raises:
        UserError: With every problem of the command line, or with Hydra's message if it could not compose.
    """
    expanded = check(overrides, [] if config_dir is None else [Path(config_dir)]).expanded()
    return run_config(compose(expanded.overrides, config_dir), expanded, config_dir, start or Path.cwd())


def run_config(tree: Mapping[str, Any], expanded: Expanded, config_dir: Path | str | None, start: Path) -> RunConfig:
    """Returns the resolved configuration of a composed tree, with absolute paths of data and weights.

    Args:
        tree: What `compose` returned for `expanded`.
        expanded: The overrides with recommendations added.
        config_dir: The folder given as --config-dir.
        start: The folder to which relative paths refer.
    """
    config = RunConfig(
        tree={key: value for key, value in tree.items() if key != "where"},  # its settings are in the overrides
        choices={group: choice for group, choice in expanded.choices.items() if choice is not None},
        overrides=tuple(expanded.overrides),
        typed=tuple(expanded.typed),
        notes=tuple(expanded.notes),
        config_dir=None if config_dir is None else Path(config_dir).resolve(),
        start=start,
    )
    return config.changed(_absolute(config, start))


def _absolute(config: RunConfig, start: Path) -> dict[str, Any]:
    """Absolute paths of the data and of pretrained weights, by their keys; values that are not paths are left out."""
    changes: dict[str, Any] = {}
    data, weights = config.get("data.path"), config.get("model.weights")
    if isinstance(data, str):
        changes["data.path"] = str(anchor(data, start))
    if isinstance(weights, str):
        weights = (weights,)
    if weights and isinstance(weights, tuple) and all(isinstance(w, str) for w in weights):
        changes["model.weights"] = [str(anchor(w, start)) for w in weights]
    return changes


def compose(overrides: Sequence[str], config_dir: Path | str | None = None) -> dict[str, Any]:
    """Composes a configuration into dictionaries and lists; works inside a running Hydra job as well.

    Raises:
        UserError: With the message of Hydra or OmegaConf if they could not compose.
    """
    extra = [] if config_dir is None else [f"hydra.searchpath=[{quote(str(Path(config_dir).resolve()))}]"]
    state = GlobalHydra.instance()
    running = state.hydra  # restored below: a job of a sweep still needs its own Hydra
    state.clear()
    try:
        with initialize_config_dir(config_dir=str(packaged_conf()), version_base="1.3", job_name="bnn-run"):
            return plain_tree(hydra_compose("config", overrides=[*overrides, *extra]))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(hydra_message(error)) from error
    except Exception as error:
        if not raised_by_hydra(error):
            raise
        raise UserError(hydra_message(error)) from error
    finally:
        GlobalHydra.instance().hydra = running


def plain_tree(composed: Any) -> dict[str, Any]:
    """Returns what Hydra composed as dictionaries and lists, without the key `hydra` and without `BLOCKS`."""
    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(tree, dict)
    for group, block in BLOCKS.items():
        if isinstance(tree.get(group), dict):
            tree[group].pop(block, None)
    return {str(k): v for k, v in tree.items() if k != "hydra"}


def raised_by_hydra(error: BaseException) -> bool:
    """Whether an error of any kind comes from Hydra's own code, which checks some settings by plain exceptions."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").partition(".")[0] in ("hydra", "omegaconf")


def hydra_message(error: BaseException) -> str:
    """Returns the message of an error of Hydra or OmegaConf and of its cause, in one paragraph."""
    parts = [str(error)]
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        parts = [
            f"Hydra could not read the command line ({type(error).__name__}: {error}). Compare it with bnn-run --help."
        ]
    if error.__cause__ is not None and str(error.__cause__) not in parts[0]:
        parts.append(str(error.__cause__))
    return " ".join(" ".join(parts).split())
