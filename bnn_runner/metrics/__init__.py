"""Metrics: pure functions of a saved Evaluation and a seed, one file and one YAML each."""
