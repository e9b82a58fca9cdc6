"""The definition of a schedule, as its row stores it: all that a tick needs."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from django_mysqlqueue.schedules.timetables import Timetable

LATEST, ALL = "latest", "all"
"""Which missed ticks run after an outage: the newest, or each."""
QUEUE, SKIP = "queue", "skip"
"""What becomes of a tick if an earlier job has not ended: its job waits, or there is none."""


class Definition(NamedTuple):
    """What a schedule publishes, and when. A process with other code can read it, too."""

    timetable: Timetable
    topic: str
    """The topic, of jobs that of their queue."""
    payload: Any
    """The payload as JSON has it; of jobs, that of their messages."""
    key: str | None = None
    metadata: dict[str, Any] | None = None
    priority: int = 0
    task: str = ""
    """The path of the task; empty: it publishes a message."""
    backend: str = ""
    """The alias in ``TASKS`` of the task's backend."""
    catch_up: str = LATEST
    overlap: str = QUEUE

    def as_json(self) -> str:
        """Return the text that the row stores, the same for equal definitions."""
        # Not by ``asdict``, which copies the payload, and gives up at a depth that JSON does not mind.
        values = {name: getattr(self, name) for name in _OWN} | asdict(self.timetable)
        return json.dumps(values, allow_nan=False, sort_keys=True)


_OF_TIMETABLE = frozenset(field.name for field in fields(Timetable))
_OWN = frozenset(Definition._fields) - {"timetable"}
_NAMES = _OWN | _OF_TIMETABLE


def parse(text: str) -> Definition:
    """Return the definition that a row stores.

    Raises:
        ValueError: it was not written by this release or an earlier one.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or (unknown := values.keys() - _NAMES):
        what = "it is not an object" if not isinstance(values, dict) else f"it has {', '.join(sorted(unknown))}"
        raise ValueError(f"This release does not know the definition: {what}.")
    times = {name: values.pop(name) for name in _OF_TIMETABLE & values.keys()}
    try:
        return Definition(Timetable(**times), **values)
    except TypeError as error:
        raise ValueError(f"This release does not know the definition: {error}.") from None
