"""The neural g-prior Λ = λ diag(H)/N (Zellner 1986; Antorán et al. 2022, with the mean in place of the sum over data).

At λ = 1 each weight's prior holds the information that one data point has of it. In scaled weights
w̃ = s^{1/2} w with s = diag(H)/N the prior is isotropic and the curvature is D H D with D = s^{-1/2},
so one spectrum serves every λ. diag(H) is that of the curvature as fitted: exact for full, block and
diag, a probe of it under method.curvature=mc_fisher, and diag(G) ⊗ diag(A) for Kronecker factors, which
D H D then still is; for a sampled curvature it is exact where its rows are kept, else probed in one pass.
Weights without curvature (of pixels that never vary) would have an infinite prior variance: they are held at
MAP, which D = 0 does, and counted.
"""

from __future__ import annotations

from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.diagonal_scaling import DiagonalScaling, ScalesByDiagonal
from bnn_runner.curvature.psd import Repairs
from bnn_runner.curvature.structures import supporting
from bnn_runner.errors import RunFailed


def g_prior(curvature: Curvature, num_points: int, repairs: Repairs) -> DiagonalScaling:
    """The curvature of the scaled weights, and s.

    Raises:
        RunFailed: the structure has no diagonal to scale by.
    """
    if isinstance(curvature, ScalesByDiagonal):
        return curvature.scaled_by_diagonal(num_points, repairs)
    raise RunFailed(
        "hyper.family=g requires a curvature that can be scaled by its own diagonal, which this one does not support. "
        f"Use method.structure={supporting('g')}, or another hyper.family."
    )
