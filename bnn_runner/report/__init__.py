"""From cells on disk to tables and figures. Nothing here imports torch until a figure of a live run is drawn."""
