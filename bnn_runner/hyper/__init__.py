"""Rules that choose the prior precision after training, and the contract of those that act in training."""
