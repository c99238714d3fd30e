"""The GGN and Fisher information of a trained network, in every structure."""
