"""The commands of a ``console`` block, and the outputs that a page prints below them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command, and what it prints; None: the page does not say."""

    text: str
    output: str | None


def commands(text: str) -> list[Command]:
    """Commands begin with ``$ ``, go on with ``> ``; what stands below is their output."""
    found = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        more = next((number for number, line in enumerate(lines[1:], 1) if not line.startswith("> ")), len(lines))
        command = lines[0] + "".join(line.removeprefix("> ") for line in lines[1:more])
        found.append(Command(command, "".join(lines[more:]) or None))
    return found


def pattern(output: str) -> re.Pattern[str]:
    """``…`` alone in a line is any number of lines, in a line any text."""
    parts = []
    for line in output.splitlines(keepends=True):
        if line == "…\n":
            parts.append(r"(?:.*\n)*")
        else:
            parts.append(".*".join(map(re.escape, line.split("…"))))
    return re.compile("".join(parts))
