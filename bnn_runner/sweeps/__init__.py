"""Sweeps: plan, job processes, launchers and sweepers."""
