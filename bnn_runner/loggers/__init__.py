"""Loggers of finished cells: one file here and one YAML file add a logger."""
