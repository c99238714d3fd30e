"""Files, leases, signals, console, devices, memory, PyTorch state: nothing specific to Bayesian inference."""
