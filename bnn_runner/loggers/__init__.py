"""Where a finished cell is told to beside its own files: one file here and one YAML add a logger."""
