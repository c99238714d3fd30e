"""The commands: bnn-run (main, flags, help, launch), bnn-report (report), bnn-predict (predict), bnn-prune (prune)."""
