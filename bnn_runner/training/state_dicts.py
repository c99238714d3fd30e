"""Finds a network's tensors in the content of a checkpoint, whatever stands next to them and before their names.

Every mapping of tensors in the checkpoint, under every prefix of its names, is an option; the one that has most of the
network's tensors is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bnn_runner.errors import UserError, did_you_mean
from bnn_runner.training.checkpoint_file import INSIDE

PREFIXES = ("module.", "model.", "_orig_mod.", "net.", "network.")
"""Prefixes that wrappers (DataParallel, Lightning, torch.compile) add to every name."""
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")
"""Parts that wrappers of a layer add in the middle of a name."""
_AVERAGED = re.compile(r"(^|[._/])(ema|swa|avg|averaged?|shadow)|ema($|[._/])", re.IGNORECASE)
_NOT_A_LAYER = re.compile(
    r"(^|\.)(criterion|loss|losses|loss_fn|loss_func|loss_function|metrics?|\w*_metrics?|\w*_acc|acc|\w*accuracy|acc\d|"
    r"confusion_matrix|auroc|optimizer|scheduler|total_ops|total_params|n_averaged|num_updates|best_\w+|epoch|step|"
    r"global_step|num_batches_tracked|_extra_state)(\.|$)",
    re.IGNORECASE,
)
"""Names that no prediction reads."""
_DEEPEST = 4


@dataclass(frozen=True)
class Found:
    """The tensors of a network in a checkpoint.

    Attributes:
        tensors: Name in the network -> tensor; also names that the network lacks.
        entry: The entry of the checkpoint and the prefix: 'state_dict', 'state_dict/model', or '' for the whole file.
        ignored: Names in the file that cannot matter: counters, loss functions, metrics, other parts.
        others: Other entries that have this network: averaged weights, a second network.
        prefix: What was removed before every name.
    """

    tensors: Mapping[str, Tensor]
    entry: str = ""
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Option:
    label: str
    prefix: str
    names: Mapping[str, str] = field(repr=False)  # name in the network -> name in the mapping
    tensors: Mapping[str, Tensor] = field(repr=False)
    covered: int = 0
    fitting: int = 0

    @property
    def entry(self) -> str:
        return "/".join(part for part in (self.label, self.prefix.rstrip(".")) if part)

    @property
    def averaged(self) -> bool:
        return bool(_AVERAGED.search(self.entry))

    @property
    def rank(self) -> tuple[int, int, bool, int, int, int]:
        """The best option has the greatest rank."""
        last = self.label.rpartition(".")[2]
        known = -INSIDE.index(last) if last in INSIDE else 1 if not self.label else -len(INSIDE)
        return (self.fitting, self.covered, not self.averaged, known, -len(self.prefix), -len(self.tensors))


def find_state(content: Mapping[str, Any], state: Mapping[str, Tensor], where: str, entry: str | None = None) -> Found:
    """Finds the tensors of a network.

    Args:
        content: The checkpoint.
        state: Name -> tensor of the network, for names and shapes; empty if the network is not known.
        where: 'model.weights=FILE', for messages.
        entry: The entry to take (`Found.entry`, or its beginning); None chooses.

    Raises:
        UserError: If there are no tensors, or no such entry, or two networks between which the user must choose.
    """
    dicts = _dicts(content)
    if not dicts:
        listed = ", ".join(map(str, list(content)[:6])) or "nothing"
        raise UserError(
            f"{where} must contain a state dict; it contains {listed}. Save it, torch.save(network.state_dict(), "
            "'weights.pt'), and use that file."
        )
    options = [o for label, tensors in dicts.items() for o in _options(label, tensors, state)]
    if state and max(o.fitting for o in options) < len(state):  # the parts of one network in several entries
        together = {n: t for label, tensors in dicts.items() for n, t in _with_label(label, tensors).items()}
        options += _options("", together, state) if len(dicts) > 1 else []
    if entry is not None:
        wanted = [o for o in options if o.entry == entry or o.entry.startswith((f"{entry}/", f"{entry}."))]
        if not wanted:
            entries = sorted({o.entry for o in options if o.entry and (o.covered or not state)})
            raise UserError(
                f"model.weights_entry must be an entry of the file; got {entry}.{did_you_mean(entry, entries)} "
                f"Entries: {', '.join(entries) or 'none: it has only one state dict'}."
            )
        options = wanted
    best = max(options, key=lambda o: o.rank)
    rivals = [
        o for o in options if o is not best and o.covered and (o.fitting, o.covered) == (best.fitting, best.covered)
    ]
    rivals = [o for o in rivals if not _same(o, best)]
    unclear = [o for o in rivals if o.averaged == best.averaged and not _is_known(best)]
    if unclear:
        entries = sorted({best.entry, *(o.entry for o in unclear)})
        raise UserError(
            f"{where} has {len(entries)} networks of this kind: {', '.join(entries)}. Choose one: "
            f"model.weights_entry={entries[0]}."
        )
    return _found(best, state, rivals, chosen=entry is not None)


def _is_known(option: _Option) -> bool:
    """Whether an option is where a network usually stands, so that others next to it are other networks."""
    usual = not option.label or option.label.rpartition(".")[2] in INSIDE
    return usual and (not option.prefix or option.prefix in PREFIXES)


def _same(a: _Option, b: _Option) -> bool:
    pairs = [(a.tensors[a.names[n]], b.tensors[b.names[n]]) for n in a.names.keys() & b.names.keys()]
    return all(x is y or (x.shape == y.shape and x.dtype == y.dtype and x.equal(y)) for x, y in pairs)


def _dicts(content: Mapping[Any, Any], label: str = "", depth: int = 0) -> dict[str, dict[str, Tensor]]:
    """Every mapping with tensors in the content, by its dotted label."""
    found: dict[str, dict[str, Tensor]] = {}
    if own := {str(n): t for n, t in content.items() if isinstance(t, Tensor)}:
        found[label] = own
    for name, value in content.items():
        if isinstance(value, Mapping) and depth < _DEEPEST and not re.match(r"optim|.*scheduler|.*scaler", str(name)):
            found |= _dicts(value, f"{label}.{name}".lstrip("."), depth + 1)
    return found


def _with_label(label: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{label}.{n}".lstrip("."): t for n, t in tensors.items()}


def _options(label: str, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[_Option]:
    """The mapping under every prefix that leads to names of the network."""
    if not state:
        short = canonical(tensors)
        return [_Option(label, "", {s: n for n, s in short.items()}, tensors)]
    best: list[_Option] = []
    for clean in (_unwrapped, _without_module):
        cleaned = {clean(n): n for n in tensors}
        prefixes = Counter(
            name[: len(name) - len(own)] for own in state for name in cleaned if name == own or name.endswith(f".{own}")
        )
        for prefix in {"", *(p for p, _ in prefixes.most_common(8))}:
            names = {n.removeprefix(prefix): full for n, full in cleaned.items() if n.startswith(prefix)}
            hits = [own for own in state if own in names]
            fitting = sum(tensors[names[own]].shape == state[own].shape for own in hits)
            best.append(_Option(label, prefix, names, tensors, len(hits), fitting))
        if any(o.covered == len(state) for o in best):
            break
    most = max(o.covered for o in best)
    return [o for o in best if 2 * o.covered >= most]


def _unwrapped(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _without_module(name: str) -> str:
    return re.sub(r"(^|\.)module\.", r"\1", _unwrapped(name))


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Returns {name: name without the prefixes in `PREFIXES` that all names share}."""
    full = list(names)
    short = list(full)
    while prefix := next((p for p in PREFIXES if short and all(n.startswith(p) for n in short)), None):
        short = [n.removeprefix(prefix) for n in short]
    return dict(zip(full, short, strict=True))


def _found(option: _Option, state: Mapping[str, Tensor], others: Sequence[_Option], chosen: bool) -> Found:
    """What is kept and what is ignored. What could be a layer is kept, so that it is reported."""
    names = dict(option.names)
    elsewhere = {full for other in others for full in other.names.values() if other.label == option.label}
    ignored = []
    for full in set(option.tensors) - set(names.values()):
        if chosen or full in elsewhere or _cannot_matter(full, option.tensors[full]) or not state:
            ignored.append(full)
        else:
            names[full] = full
    for own, full in option.names.items():
        if state and own not in state and _cannot_matter(own, option.tensors[full]):
            ignored.append(full)
            del names[own]
    kept = {own: option.tensors[full].detach() for own, full in names.items()}
    found = tuple(dict.fromkeys(o.entry for o in others))
    return Found(kept, option.entry, option.prefix, tuple(sorted(ignored)), found)


def _cannot_matter(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a counter, or belongs to a loss function, a metric or an optimiser."""
    counter = tensor.numel() <= 1 and not tensor.is_floating_point() and not tensor.is_complex()
    return counter or bool(_NOT_A_LAYER.search(name))
