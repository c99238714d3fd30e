"""Rules that choose the prior precision after training, and the contract of rules that act during training."""
