"""The table of curvature structures: how each is fitted, and what the rest of the program asks about it.

A new structure is a file with its fit and one entry here: `method.structure` then accepts it, combinations that it
does not support are refused before anything runs, and the tests of structures find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.block_fits import fit_diagonal, fit_ekfac, fit_kfac, fit_layers
from bnn_runner.curvature.full import bytes_needed, fit_full
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.low_rank import fit_low_rank
from bnn_runner.curvature.training_passes import TrainingPasses
from bnn_runner.runtime.memory import halving


@dataclass(frozen=True)
class StructureSpec:
    """One curvature structure.

    Attributes:
        fit: the fit, in one or two passes over the training set.
        treatment: how the tensors of a group are treated, in words.
        families: of `hyper.family`, g and parameter where they are supported; every structure supports the others.
        kronecker: whether `method.sharing` and `method.bias` apply.
        ranked: whether `method.rank` applies.
        by_layer: whether a group is a whole layer, not a tensor.
        single_weights: whether it can be fitted over single weights of a tensor (`method=laplace_subnetwork`).
        in_training: whether rules that choose precisions during training can use it (`hyper=online`, `mackay_loop`).
        cites: BibTeX keys of its sources.
    """

    fit: Callable[[TrainingPasses], Curvature]
    treatment: Callable[[Jacobians, Group], str]
    families: frozenset[str] = frozenset()
    kronecker: bool = False
    ranked: bool = False
    by_layer: bool = False
    single_weights: bool = False
    in_training: bool = False
    cites: tuple[str, ...] = ()


def _always(words: str) -> Callable[[Jacobians, Group], str]:
    return lambda jacobians, group: words


def _kronecker_treatment(jacobians: Jacobians, group: Group) -> str:
    if group.homogeneous:
        return "Kronecker factors, weight and bias together"
    words = {
        "matrix": "Kronecker factors",
        "bias": "own block (output factor)",
        "norm": "own block (exact)",
        "general": "own diagonal (exact)",
    }
    return words[jacobians.rule(group.name)]


STRUCTURES: dict[str, StructureSpec] = {
    "full": StructureSpec(
        fit=lambda passes: fit_full(passes.jacobians, passes.batches(), passes.num_rows, passes.repairs),
        treatment=_always("full curvature"),
        families=frozenset({"g"}),
        single_weights=True,
        in_training=True,
    ),
    "block": StructureSpec(
        fit=lambda passes: fit_layers(passes.jacobians, passes.batches, passes.repairs),
        treatment=_always("own block (exact, by layer)"),
        families=frozenset({"g"}),
        by_layer=True,
    ),
    "kfac": StructureSpec(
        fit=lambda passes: fit_kfac(
            passes.jacobians, passes.factor_batches, passes.repairs, passes.sharing, passes.joint_bias
        ),
        treatment=_kronecker_treatment,
        families=frozenset({"g"}),
        kronecker=True,
        in_training=True,
        cites=("martens2015", "botev2017", "grosse2016"),
    ),
    "ekfac": StructureSpec(
        fit=lambda passes: fit_ekfac(
            passes.jacobians, passes.factor_batches, passes.repairs, passes.sharing, passes.joint_bias
        ),
        treatment=_kronecker_treatment,
        kronecker=True,
        in_training=True,
        cites=("martens2015", "botev2017", "grosse2016", "george2018"),
    ),
    "diag": StructureSpec(
        fit=lambda passes: fit_diagonal(passes.jacobians, passes.factor_batches),
        treatment=_always("diagonal"),
        families=frozenset({"g", "parameter"}),
        single_weights=True,
        in_training=True,
    ),
    "low_rank": StructureSpec(
        fit=lambda passes: fit_low_rank(passes.jacobians, passes.batches, passes.num_rows, passes.rank, passes.repairs),
        treatment=_always("leading eigenpairs of the full curvature"),
        ranked=True,
        cites=("halko2011", "gittens2016"),
    ),
}
AUTO = ("full", "kfac")
"""What `auto` decides between, by the size of the problem."""
AUTO_BYTES = 2**30
"""Of the full curvature's matrices, up to which `auto` takes it."""

if TYPE_CHECKING:
    Structure = str
    SingleWeightStructure = str
    TrainingStructure = str
else:  # read when a configuration is checked
    Structure = Literal[tuple(STRUCTURES)]
    SingleWeightStructure = Literal[tuple(name for name, spec in STRUCTURES.items() if spec.single_weights)]
    TrainingStructure = Literal[("auto", *(name for name, spec in STRUCTURES.items() if spec.in_training))]


def fit_structure(structure: Structure, passes: TrainingPasses) -> Curvature:
    """The curvature; where memory runs out, the fit starts again with half as many points at once, which is counted."""
    return halving(lambda: STRUCTURES[structure].fit(passes), lambda: passes.jacobians.halve(passes.repairs))


def decided(structure: Structure | Literal["auto"], num_weights: int, num_rows: int, full_up_to: int) -> Structure:
    """What `auto` stands for: full where its smaller side is small and fits in memory, else kfac.

    Args:
        structure: any other than auto is returned as it is.
        num_weights: P.
        num_rows: M = N·C.
        full_up_to: most rows of the smaller side.
    """
    if structure != "auto":
        return structure
    small = min(num_weights, num_rows) <= full_up_to and bytes_needed(num_weights, num_rows) < AUTO_BYTES
    return AUTO[0] if small else AUTO[1]


def supports(structure: Structure | Literal["auto"], family: str) -> bool:
    """Whether a structure supports a family of prior precisions; auto where all that it decides between do."""
    if family not in {name for spec in STRUCTURES.values() for name in spec.families}:
        return True  # every structure supports isotropic, layerwise and groupwise
    return all(family in STRUCTURES[name].families for name in (AUTO if structure == "auto" else (structure,)))


def supporting(family: str) -> str:
    """The structures that support a family, for a message: 'full, block or diag'."""
    names = [name for name, spec in STRUCTURES.items() if family in spec.families]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
