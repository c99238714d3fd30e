"""Files, leases, signals, console, devices, memory, PyTorch state: knows nothing of Bayesian inference."""
