"""Small tasks and networks for numerical tests: those of `bnn_runner.testing`."""

from bnn_runner.testing.problems import context, make_network, make_task

__all__ = ["context", "make_network", "make_task"]
