"""The methods: one file for each class, found through the YAML files of conf/method."""
