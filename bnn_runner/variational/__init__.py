"""Variational inference over weights: factorised Gaussians, gradient estimators, their training and draws."""
