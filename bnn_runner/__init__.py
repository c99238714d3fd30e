"""bnn_runner: a command-line experiment runner for Bayesian neural networks. Importing it imports nothing heavy."""

__version__ = "0.1.0"
