"""Conditional settings of an experiment file: its block `where:`, as in `method=sgld: {method.chains: 4}`.

A sweep is a product of choices, and most settings of one method do not exist for another. The condition of a rule is
one or more words `name=choice,choice`, all of which must hold; names are groups, `size`, and keys that are typed or
swept. The values of a rule are dotted keys, or choices of groups. The command line overrides them.

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
SIZES = (SMALL, "medium", "paper")
"""small: minutes on two CPU cores; medium: at most 150 minutes on them; paper: the published settings."""


def settings_where(rules: Mapping[str, Any], values: Mapping[str, Any], typed: Collection[str] = ()) -> dict[str, Any]:
    """Returns {key: value} of all rules whose condition holds; later rules override earlier ones.

    If a rule sets the choice of a group, the conditions after it see the new choice.

    Args:
        rules: Condition -> values, the block `where`.
        values: Value of each name that a condition may use.
        typed: Keys set on the command line; rules do not change them.

    Raises:
        UserError: If a rule is not a condition with a mapping.
    """
    current = dict(values)
    settings: dict[str, Any] = {}
    for condition, body in rules.items():
        terms = [term.partition("=") for term in condition.split()]
        if not terms or not all(name and choices for name, _, choices in terms) or not isinstance(body, Mapping):
            raise UserError(
                f"A rule of `where` must be a condition and a mapping; got {condition!r}. Correct the experiment's "
                f"file, as in 'method=sgld: {{method.chains: 4}}'."
            )
        if all(str(current.get(name)) in choices.split(",") for name, _, choices in terms):
            new = {key: value for key, value in body.items() if key not in typed}
            settings |= new
            current |= {key: value for key, value in new.items() if key in values}
    return settings


def has_size(rules: Mapping[str, Any], size: str) -> bool:
    """Whether an experiment with these rules defines the size; every experiment has the small one."""
    return size == SMALL or any(f"size={size}" in condition.split() for condition in rules)
