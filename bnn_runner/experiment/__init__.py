"""From overrides to an experiment: composed once by Hydra, built from trusted classes, checked as a whole."""

from bnn_runner.experiment.assemble import Experiment, build_experiment, load_experiment
from bnn_runner.experiment.components import build
from bnn_runner.experiment.compose import compose, resolve_run

__all__ = ["Experiment", "build", "build_experiment", "compose", "load_experiment", "resolve_run"]
