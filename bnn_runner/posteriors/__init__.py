"""Posteriors that several methods share, and how a posterior is saved."""
