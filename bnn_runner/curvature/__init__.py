"""The GGN and the Fisher information of a trained network, in every structure."""
