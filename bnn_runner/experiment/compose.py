"""From overrides to the resolved configuration of one run. The only place where Hydra composes for us."""

from __future__ import annotations

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
    """Check, expand and compose the overrides of one run.

    Args:
        overrides: as typed, without sweeps.
        config_dir: a folder of further choices.
        start: the folder that relative paths are taken from; the present one by default.

    Raises:
        UserError: with every mistake on the command line, or what Hydra could not compose.
    """
    expanded = check(overrides, [] if config_dir is None else [Path(config_dir)]).expanded()
    return run_config(compose(expanded.overrides, config_dir), expanded, config_dir, start or Path.cwd())


def run_config(tree: Mapping[str, Any], expanded: Expanded, config_dir: Path | str | None, start: Path) -> RunConfig:
    """The resolved configuration of a composed `tree`, its paths of data and weights made absolute."""
    config = RunConfig(
        tree={key: value for key, value in tree.items() if key != "where"},  # an experiment's, and expanded
        choices={group: choice for group, choice in expanded.choices.items() if choice is not None},
        overrides=tuple(expanded.overrides),
        typed=tuple(expanded.typed),
        notes=tuple(expanded.notes),
        config_dir=None if config_dir is None else Path(config_dir).resolve(),
        start=start,
    )
    return config.changed(_absolute(config, start))


def _absolute(config: RunConfig, start: Path) -> dict[str, Any]:
    """Paths of the data and of a network trained elsewhere, anchored to `start`. What is no path is left alone."""
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
    """The composed configuration as plain containers; works inside a running Hydra job as well.

    Raises:
        UserError: for what Hydra or OmegaConf cannot make sense of.
    """
    extra = [] if config_dir is None else [f"hydra.searchpath=[{quote(str(Path(config_dir).resolve()))}]"]
    state = GlobalHydra.instance()
    running = state.hydra  # a job of a sweep must find its Hydra again
    state.clear()
    try:
        with initialize_config_dir(config_dir=str(packaged_conf()), version_base="1.3", job_name="bnn-run"):
            return plain_tree(hydra_compose("config", overrides=[*overrides, *extra]))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(hydra_message(error)) from error
    finally:
        GlobalHydra.instance().hydra = running


def plain_tree(composed: Any) -> dict[str, Any]:
    """What Hydra composed, resolved, without Hydra's own settings and without `BLOCKS`."""
    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(tree, dict)
    for group, block in BLOCKS.items():
        if isinstance(tree.get(group), dict):
            tree[group].pop(block, None)
    return {str(k): v for k, v in tree.items() if k != "hydra"}


def hydra_message(error: BaseException) -> str:
    """What Hydra or OmegaConf says, in one paragraph, with its cause."""
    parts = [str(error)]
    if error.__cause__ is not None and str(error.__cause__) not in parts[0]:
        parts.append(str(error.__cause__))
    return " ".join(" ".join(parts).split())
