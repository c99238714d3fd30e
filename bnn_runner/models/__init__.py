"""The models: one file for each, found through its YAML."""
