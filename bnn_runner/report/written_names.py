"""Heads of tables as a paper writes them: `dyadic_loglik kappa=2 [nats per block] ↑` is "Dyadic LL (κ = 2)"."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMES = {
    "marginal_loglik": "Marginal LL", "joint_loglik": "Joint LL", "dyadic_loglik": "Dyadic LL",
    "dyadic_forced_loglik": "Dyadic LL, forced", "accuracy": "Accuracy", "rmse": "RMSE", "crps": "CRPS", "ece": "ECE",
    "brier": "Brier score", "ood_auroc": "AUROC", "auroc": "AUROC", "log evidence": "Log evidence",
    "coverage_50": "Coverage of 50%", "coverage_90": "Coverage of 90%", "coverage_95": "Coverage of 95%",
}  # fmt: skip
_TOKEN = re.compile(r"[A-Za-z]+(?:_[A-Za-z0-9]+)+")
_HEAD = re.compile(r"(?P<name>.*?)(?: \[(?P<unit>[^\]]*)\])?(?: (?P<arrow>[↑↓]))?")


@dataclass(frozen=True)
class WrittenHead:
    """The head of a column in parts: name, what follows in parentheses, unit and arrow; each may be empty."""

    name: str
    detail: str = ""
    unit: str = ""
    arrow: str = ""

    @property
    def lines(self) -> list[str]:
        """Up to three lines, the arrow at the end of the last one before the unit."""
        words = [w for w in (self.name, self.detail) if w]
        words[-1] += f" {self.arrow}" if self.arrow else ""
        return [*words, *([f"[{self.unit}]"] if self.unit else [])]

    @property
    def line(self) -> str:
        """Everything on one line."""
        unit = f"[{self.unit}]" if self.unit else ""
        return " ".join(w for w in (self.name, self.detail, unit, self.arrow) if w)


def written(head: str) -> WrittenHead:
    """A head of a column of numbers, `label [unit] ↑`, in the words of a paper.

    >>> written("joint_loglik tau=10 [nats per block] ↑").line
    'Joint LL (τ = 10) [nats per block] ↑'
    >>> written("Δ ood_auroc (ood/far) [fraction] ↑").lines
    ['Δ AUROC', '(far) ↑', '[fraction]']
    """
    match = _HEAD.fullmatch(head)
    assert match is not None  # both ends are optional
    name, details = match["name"], []
    for pattern, word in ((r"\s*\bkappa=(\d+)", "κ = "), (r"\s*\btau=(\d+)", "τ = ")):
        if found := re.search(pattern, name):
            details.append(f"{word}{found[1]}")
            name = name.replace(found[0], "")
    if found := re.search(r"\s*\(([^()]*)\)$", name):
        details.append(found[1].removeprefix("ood/").removeprefix("shift/").replace("/", " "))
        name = name[: found.start()]
    for key in sorted(NAMES, key=len, reverse=True):
        name = re.sub(rf"(?<![A-Za-z_]){key}(?![A-Za-z_0-9])", NAMES[key], name)
    name = _TOKEN.sub(lambda token: token[0].replace("_", " "), name)
    detail = f"({', '.join(details)})" if details else ""
    return WrittenHead(name[:1].upper() + name[1:], detail, match["unit"] or "", match["arrow"] or "")
