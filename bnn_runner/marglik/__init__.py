"""Training by the marginal likelihood: the evidence of a network during training, and the rules that climb it."""
