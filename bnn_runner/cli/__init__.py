"""The commands: bnn-run (main, help) and bnn-report (report)."""
