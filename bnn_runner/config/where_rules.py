"""What an experiment file sets under a condition: its block `where:`, as in `method=sgld: {method.chains: 4}`.

A sweep is a product of choices, and most settings of one method are none of another's. A rule of `where` has one or
more words `name=choice,choice` as its condition, all of which must hold; names are groups, `size`, and keys that are
typed or swept. Its values are dotted keys, or choices of groups. What is typed on the command line wins over them.

    where:
      method=sgld,csgld: {method.chains: 4}
      size=paper: {model: resnet18, schedule.epochs: 200}
      size=paper method=bbb: {method.epochs: 600}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bnn_runner.errors import UserError

SMALL = "small"
SIZES = (SMALL, "paper")
"""small: two CPU cores; paper: the published settings."""


def settings_where(rules: Mapping[str, Any], chosen: Mapping[str, Any], typed: Collection[str] = ()) -> dict[str, Any]:
    """{key: value} of every rule that holds for these choices, later rules over earlier ones, without `typed` keys.

    A rule that chooses a group counts for the conditions after it. Raises `UserError` for a rule that is none.
    """
    now = dict(chosen)
    found: dict[str, Any] = {}
    for condition, values in rules.items():
        words = [word.partition("=") for word in condition.split()]
        if not words or not all(name and choices for name, _, choices in words) or not isinstance(values, Mapping):
            raise UserError(
                f"The experiment's `where` has the rule {condition!r}; a rule must be a condition and a mapping, "
                f"as in 'method=sgld: {{method.chains: 4}}'."
            )
        if all(str(now.get(name)) in choices.split(",") for name, _, choices in words):
            kept = {key: value for key, value in values.items() if key not in typed}
            found |= kept
            now |= {key: value for key, value in kept.items() if key in chosen}
    return found


def has_size(rules: Mapping[str, Any], size: str) -> bool:
    """Whether the rules say anything for this size; every experiment has the small one."""
    return size == SMALL or any(f"size={size}" in condition.split() for condition in rules)
