"""Data sets: one file for each kind, and the few things they share (splits, scaling, images, files)."""
