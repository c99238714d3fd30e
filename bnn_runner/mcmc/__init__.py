"""Markov chain Monte Carlo over weights: L chains at once, their dynamics, adaptation and diagnostics."""
