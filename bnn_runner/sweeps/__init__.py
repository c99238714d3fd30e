"""Sweeps: the plan, the processes of jobs, launchers and sweepers."""
