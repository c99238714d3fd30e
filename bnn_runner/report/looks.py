"""The colour and marker of each method: the same in every figure, with one hue for a family of methods.

A method of your own gets a free pair that depends on its name. Rows of one method that differ in their settings have
tints of its colour and markers of their own; if a page has a single method, its settings have the palette's colours.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bnn_runner.report.style import COLOURS, SHAPES, tints
from bnn_runner.report.tables import Row, Table

LAPLACE, LAPLACE_BLOCK, LAPLACE_DARK, LAPLACE_LIGHT, LAPLACE_VIOLET, LAPLACE_TEAL = (
    "#0072B2", "#3A5FCD", "#00395A", "#56B4E9", "#5F5FD3", "#2E8FA3",
)  # fmt: skip
ENSEMBLE, VARIATIONAL, DROPOUT, SWAG, SGMCMC, POINT, HMC = (
    "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#999933", "#000000", "#6E6E6E",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """Colour and marker."""

    colour: str
    marker: str


# Similar colours within a family, never the same pair twice. Blue: Laplace (light: Kronecker factors; dark: diagonal,
# low rank and the network itself; violet: the last layer; teal: large networks).
METHODS: Mapping[str, Look] = {
    "map": Look(POINT, "o"),
    "ensemble": Look(ENSEMBLE, "s"),
    "ensemble_laplace": Look("#8A3B00", "D"),
    "hmc": Look(HMC, "*"),
    "laplace": Look(LAPLACE, "o"),
    "laplace_full": Look(LAPLACE, "s"),
    "laplace_block": Look(LAPLACE_BLOCK, "D"),
    "laplace_closed_form": Look(LAPLACE, "P"),
    "laplace_kfac": Look(LAPLACE_LIGHT, "^"),
    "laplace_kfac_mc": Look(LAPLACE_LIGHT, "v"),
    "laplace_ekfac": Look(LAPLACE_LIGHT, "P"),
    "laplace_diag": Look(LAPLACE_DARK, "X"),
    "laplace_low_rank": Look(LAPLACE_DARK, "D"),
    "laplace_network": Look(LAPLACE_DARK, "*"),
    "laplace_last_layer": Look(LAPLACE_VIOLET, "v"),
    "laplace_last_layer_kfac": Look(LAPLACE_VIOLET, "<"),
    "laplace_sampled": Look(LAPLACE_TEAL, "h"),
    "laplace_functional": Look(LAPLACE_TEAL, "p"),
    "laplace_subnetwork": Look(LAPLACE_TEAL, ">"),
    "bbb": Look(VARIATIONAL, "o"),
    "bbb_flipout": Look(VARIATIONAL, "s"),
    "bbb_weights": Look("#00614A", "^"),
    "mc_dropout": Look(DROPOUT, "D"),
    "concrete_dropout": Look("#8E3B6B", "P"),
    "swag": Look(SWAG, "^"),
    "swag_diag": Look(SWAG, "v"),
    "multi_swag": Look("#96690A", "X"),
    "sgld": Look(SGMCMC, "o"),
    "psgld": Look(SGMCMC, "s"),
    "csgld": Look("#5E5E14", "^"),
    "sghmc": Look(SGMCMC, "D"),
    "csghmc": Look("#5E5E14", "v"),
}
_SPARE = ("#882255", "#332288", "#44AA99", "#AA4499", "#7A5230", "#117733")


def look(method: str) -> Look:
    """The look of a method, whatever else a figure shows."""
    if method in METHODS:
        return METHODS[method]
    place = zlib.crc32(method.encode())
    return Look(_SPARE[place % len(_SPARE)], SHAPES[place // len(_SPARE) % len(SHAPES)])


def identity(row: Row) -> tuple[str, ...]:
    """What shares one colour and marker in every panel: method and the settings that distinguish rows."""
    return (row.group.key.method, *row.extra.values())


def looks(table: Table) -> dict[tuple[str, ...], Look]:
    """The look of each `identity` of a table's rows."""
    return looks_of(identity(row) for row in table.rows)


def looks_of(identities: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Look]:
    """The look of each identity, in order; no two have the same colour and marker while there are free ones."""
    variants: dict[str, list[tuple[str, ...]]] = {}
    for name in dict.fromkeys(identities):
        variants.setdefault(name[0], []).append(name)
    if len(variants) == 1:
        ((method, names),) = variants.items()
        return _of_one_method(method, names)
    found: dict[tuple[str, ...], Look] = {}
    for method, names in variants.items():
        own = look(method)
        shift = SHAPES.index(own.marker)
        for i, (name, tint) in enumerate(zip(names, tints(own.colour, len(names)), strict=True)):
            found[name] = _free(Look(tint, SHAPES[(shift + i) % len(SHAPES)]), set(found.values()))
    return found


def _of_one_method(method: str, names: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Look]:
    if len(names) == 1:
        return {names[0]: look(method)}
    count = len(COLOURS)
    return {name: Look(COLOURS[i % count], SHAPES[(i + i // count) % len(SHAPES)]) for i, name in enumerate(names)}


def _free(wanted: Look, taken: set[Look]) -> Look:
    """`wanted`, or the same colour with the next marker that is free."""
    start = SHAPES.index(wanted.marker)
    options = (Look(wanted.colour, SHAPES[(start + i) % len(SHAPES)]) for i in range(len(SHAPES)))
    return next((option for option in options if option not in taken), wanted)
