"""How messages are written: words that no message has, and the fixture that looks at the messages of every test."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from bnn_runner.errors import RunFailed, UserError
from bnn_runner.runtime.console import Console

FORBIDDEN = re.compile(r"\b(cannot be|told|anew|mend|mended|is none|is not to be had|beside|gone on)\b")
"""Words that make a native reader stop; write "does not support", "reported", "again", "next to", "resumed"."""
FOREIGN = ("Object arrays cannot be loaded", "shapes cannot be multiplied")
"""Sentences of other programs, which our messages quote."""


def problems_of(message: str, sentences: bool = False) -> list[str]:
    """What is wrong with a message; `sentences`: it must consist of them; a last one may end in ': COMMAND'."""
    for quoted in FOREIGN:
        message = message.replace(quoted, "")
    found = [f"has {match.group(0)!r}" for match in FORBIDDEN.finditer(message)]
    last = re.split(r"(?<=[.?!)])\s", message.strip())[-1]
    if sentences and not last.endswith((".", "?", "!", ")")) and not re.search(r":\s", last):
        found.append("does not end as a sentence")
    return found


@pytest.fixture(autouse=True)
def plain_messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every `UserError`, `RunFailed` and line of a run that a test provokes in its own process is in plain English."""
    messages: list[tuple[str, bool]] = []
    raised, failed, said = UserError.__init__, RunFailed.__init__, Console.say

    def user_error(self: UserError, *problems: str) -> None:
        messages.extend((problem, True) for problem in problems)
        raised(self, *problems)

    def run_failed(self: RunFailed, *words: object) -> None:
        messages.extend((str(word), False) for word in words)
        failed(self, *words)

    def say(self: Console, text: str = "") -> None:
        messages.append((text, False))
        said(self, text)

    monkeypatch.setattr(UserError, "__init__", user_error)
    monkeypatch.setattr(RunFailed, "__init__", run_failed)
    monkeypatch.setattr(Console, "say", say)
    yield
    wrong = {text: found for text, sentences in messages if (found := problems_of(text, sentences))}
    assert not wrong, "\n".join(f"{'; '.join(found)}: {text}" for text, found in wrong.items())
