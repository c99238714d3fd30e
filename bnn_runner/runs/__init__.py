"""One cell from its start to DONE, and opened again."""
