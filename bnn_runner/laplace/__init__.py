"""Linearised Laplace: evidence, the tangent model and its optimum, prior families, sampled and functional forms."""
