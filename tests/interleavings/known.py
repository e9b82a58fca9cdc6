"""What is known of the schedules: outcomes of no serial order, waits, deadlocks, each with why it is right.

Three files in ``expected/``, which ``make explore RECORD=1`` writes and people
read: what is new in them is looked at before it is committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "expected"
ARROW, BAR = " <- ", " | "
DETAIL = "      "
NOBODY = "nobody"
"""Whom a statement waits for that none of the other operations seems to have made wait."""


def wait(waiter: str, label: str, holder: str) -> str:
    """A statement of one operation that waits for another operation."""
    return f"{waiter}{BAR}{label}{ARROW}{holder}"


def deadlock(victim: str, label: str, others: Sequence[str]) -> str:
    return f"{victim}{BAR}{label}{ARROW}{' + '.join(others)}"


class Outcome(NamedTuple):
    """An outcome that no serial order has."""

    reason: str
    schedule: str
    unlike: str
    """Where it differs from the nearest serial one."""


@dataclass
class Known:
    """The contents of the three files."""

    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    """Pair → digest → what is known of it."""
    waits: set[str] = field(default_factory=set)
    deadlocks: dict[str, str] = field(default_factory=dict)
    """What → why."""

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Known:
        known = cls()
        pair = digest = ""
        for line in lines_of(folder / "outcomes.txt"):
            if line.startswith(DETAIL):
                known.outcomes[pair][digest] = known.outcomes[pair][digest]._replace(unlike=line.removeprefix(DETAIL))
            elif line.startswith("  "):
                digest, reason, schedule = line.split(None, 2)
                known.outcomes.setdefault(pair, {})[digest] = Outcome(reason, schedule, "")
            else:
                pair = line
        statement = ""
        for line in lines_of(folder / "waits.txt"):
            if line.startswith("  "):
                known.waits.update(f"{statement}{ARROW}{holder.strip()}" for holder in line.split(";"))
            else:
                statement = line
        for line in lines_of(folder / "deadlocks.txt"):
            what, _, why = line.partition(" : ")
            known.deadlocks[what] = why
        return known

    def write(self, sentences: Mapping[str, str], folder: Path = FOLDER) -> None:
        """Writes the files; ``sentences`` say what the reasons are."""
        folder.mkdir(exist_ok=True)
        lines = [
            "# Outcomes that no serial order of the operations has: digest, reason, a schedule, and where it differs"
        ]
        lines += ["# from the serial outcome that is nearest. The reasons:"]
        lines += [f"# {name}: {sentence}" for name, sentence in sentences.items()]
        for pair, found in sorted(self.outcomes.items()):
            lines.append(pair)
            for digest, one in sorted(found.items()):
                lines += [f"  {digest} {one.reason} {one.schedule}", DETAIL + one.unlike]
        (folder / "outcomes.txt").write_text("\n".join(lines) + "\n")
        (folder / "waits.txt").write_text("\n".join(self._waits()) + "\n")
        lines = ["# Deadlocks, and why each may be: victim | statement <- the others : why."]
        lines += [f"{what} : {why}" for what, why in sorted(self.deadlocks.items())]
        (folder / "deadlocks.txt").write_text("\n".join(lines) + "\n")

    def _waits(self) -> Iterable[str]:
        yield "# Which statement of which operation may wait for a lock, and below it for which operations."
        holders: dict[str, list[str]] = {}
        for one in sorted(self.waits):
            statement, _, holder = one.partition(ARROW)
            holders.setdefault(statement, []).append(holder)
        for statement, names in holders.items():
            yield statement
            yield "  " + "; ".join(names)


def lines_of(path: Path) -> Iterable[str]:
    """The lines of a file without comments."""
    if path.exists():
        for line in path.read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                yield line
