"""Options of bnn-report, bnn-predict and bnn-prune as bnn-run spells them: `output_dir=x` means `--output-dir x`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from bnn_runner.config.overrides import UNKNOWN, parse, to_text
from bnn_runner.errors import UserError, raise_all


def with_hyphens(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with hyphens for underscores in the names of options: --output_dir is --output-dir."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return words


def apply_settings(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str], names: Mapping[str, str]
) -> list[str]:
    """Sets the options that are written `key=value`. Returns the words that are not such settings.

    Args:
        parser: Parser of the command.
        arguments: Its parsed options; they are changed.
        words: The words of the command line that are no options.
        names: {key as in bnn-run: name of the option}.

    Raises:
        UserError: If a value does not fit its option.
    """
    actions = {action.dest: action for action in parser._actions}
    rest: list[str] = []
    problems: list[str] = []
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or key not in names:
            rest.append(word)
            continue
        try:
            value = _value(word)
            action = actions[names[key]]
            if value is None:
                setattr(arguments, action.dest, action.default)
                continue
            if isinstance(action, (argparse._StoreTrueAction, argparse._StoreFalseAction)):
                if not isinstance(value, bool):
                    raise UserError(f"{key} must be true or false; got {value}.")
                setattr(arguments, action.dest, value)
                continue
            text = value if isinstance(value, str) else to_text(value)
            converted = action.type(text) if callable(action.type) else text
            if action.choices is not None and converted not in action.choices:
                raise UserError(f"{key} must be one of {', '.join(map(str, action.choices))}; got {text}.")
            setattr(arguments, action.dest, converted)
        except UserError as error:
            problems += error.problems
        except ValueError:
            problems.append(f"{word}: the value does not fit. See {parser.prog} --help.")
    raise_all(problems)
    return rest


def _value(word: str) -> Any:
    """The value of an override; lists and comma-separated values are one text."""
    try:
        override = parse(word)
    except UserError:  # text that only Hydra's grammar refuses
        return word.partition("=")[2]
    if UNKNOWN in override.values:
        return override.raw
    values = override.value if isinstance(override.value, list) else list(override.values)
    return values[0] if len(values) == 1 else ",".join(v if isinstance(v, str) else to_text(v) for v in values)
