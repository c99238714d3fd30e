"""The tangent model of a network at its trained weights, and the posteriors that stand on it."""
