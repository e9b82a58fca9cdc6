"""Which statements each operation sends when nobody else works: their tables and locks, and the number of round trips.

``expected/statements.txt`` has a line for each operation in each of its worlds: what a rebuilding of the code must not
change by accident.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from django.db import connections

from tests.crash.crashes import ALIAS
from tests.interleavings.exploration import Exploration
from tests.interleavings.known import BAR, FOLDER, lines_of
from tests.interleavings.operations import OPERATIONS, Actor
from tests.interleavings.pairs import pairs
from tests.interleavings.schedules import Prefix
from tests.interleavings.trials import Beginning, Pair, Trial
from tests.support.harness import USING

FILE = FOLDER / "statements.txt"
HEAD = (
    "# What each operation sends, alone in each of its worlds: the number of round trips; the statements that touch",
    "# the queue's tables with their locks, in their order, and the server if the other one has another line.",
)
SERVERS = ("mariadb", "mysql")
BY_CHANCE = {f"{world}: a turn, ordered" for world in ("forsaken", "lost_again", "used_up")}
"""The order in which a subscriber claims partitions that it has taken over depends on the process's hash seed."""
Sent = dict[str, str]
"""World and operation → the round trips and the statements."""


def sent(found: Exploration) -> Sent:
    """Of each operation in each world in which a pair has it, on one server."""
    places = {(pair.world, one.name) for pair in pairs().values() for one in pair.operations if one.name in OPERATIONS}
    lines: Sent = {}
    beginning: Beginning | None = None
    for world, name in sorted(places):
        if (title := f"{world}: {name}") not in BY_CHANCE:
            operation, counts = OPERATIONS[name], list[int]()
            alone = Pair(world, (dataclasses.replace(operation, run=_counting(operation.run, counts)),))
            trial = found.trial(alone, beginning)
            lines[title], beginning = _sent(trial, counts), trial.beginning
    return lines


def _sent(trial: Trial, counts: list[int]) -> str:
    trial.run(Prefix([]))  # It fills what the process and its connections remember.
    labels = [step.label for step in trial.run(Prefix([])).run.steps]
    same = ((label, len(list(ones))) for label, ones in groupby(labels))
    return f"{counts[-1]}{BAR}{' '.join(label if number == 1 else f'{label} x{number}' for label, number in same)}"


def _counting(run: Callable[[Actor], object], counts: list[int]) -> Callable[[Actor], object]:
    def counted(a: Actor) -> object:
        before = _questions()
        try:
            return run(a)
        finally:
            counts.append(_questions() - before - 1)

    return counted


def _questions() -> int:
    """How many statements this thread's session has sent; the one that asks is among them."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SHOW SESSION STATUS LIKE 'Questions'")
        return int(cursor.fetchone()[1])


# -- the file -----------------------------------------------------------------------


def server() -> str:
    """The server under test: it may have lines of its own."""
    return "mariadb" if connections[USING].mysql_is_mariadb else "mysql"  # type: ignore[attr-defined]


def read(of: str, path: Path = FILE) -> Sent:
    """What is recorded for a server."""
    found: Sent = {}
    for line in lines_of(path):
        name, trips, statements, *alone = line.split(BAR)
        if alone in ([], [of]):
            found[name] = BAR.join((trips, statements))
    return found


def record(new: Sent, path: Path = FILE) -> None:
    """Writes what the server under test gets; what is recorded for the other one stays."""
    sides = {of: new if of == server() else read(of, path) for of in SERVERS}
    lines = []
    for name in sorted({name for side in sides.values() for name in side}):
        texts = {of: side[name] for of, side in sides.items() if name in side}
        if len(texts) == len(SERVERS) and len({*texts.values()}) == 1:
            lines.append(BAR.join((name, *{*texts.values()})))
        else:
            lines += [BAR.join((name, text, of)) for of, text in texts.items()]
    path.write_text("\n".join((*HEAD, *lines)) + "\n")
