"""Configuration before anything heavy is imported: groups and choices, overrides, schema, settings, keys."""
