"""The light part of configuration (no torch, no Hydra): groups and choices, overrides, schema, settings, keys."""
