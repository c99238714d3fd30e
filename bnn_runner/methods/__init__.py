"""The methods: one file for each, found through its YAML."""
