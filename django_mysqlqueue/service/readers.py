"""Registered readers: programs outside of the database, the archive and streams of Spark, for which GC keeps messages.

They store their positions themselves. They have a row for each topic, or one for all topics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

from django.utils.translation import gettext_lazy

from django_mysqlqueue.db.tables import ARCHIVE, READERS
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import audit
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, grouped, run

DROP = audit.Action("drop reader", gettext_lazy("Drop reader"))


class RegisteredReader(NamedTuple):
    """A registered reader."""

    name: str
    topics: tuple[str, ...]
    """The topics that it reads; empty: all."""
    offset: int
    """All of their messages up to this offset have been read."""
    moved_at: int
    """When it stored this, in epoch milliseconds."""


def registered(session: Session) -> Sequence[RegisteredReader]:
    """Return the registered readers by name."""
    rows = session.rows(f"SELECT name, topic, read_offset, moved_at FROM {READERS} ORDER BY name, topic")
    return [
        RegisteredReader(name, tuple(topic for topic, *_ in found if topic), min(one[1] for one in found), found[0][2])
        for name, found in grouped((name, rest) for name, *rest in rows).items()
    ]


def waited_for(readers: Sequence[RegisteredReader]) -> Sequence[RegisteredReader]:
    """Return those for which GC waits. The archive is one with ``ARCHIVE_REQUIRED``, even before its first run."""
    found = [one for one in readers if one.name != ARCHIVE]
    if get_settings().archive_required:
        none = RegisteredReader(ARCHIVE, (), 0, 0)
        found.append(next((one for one in readers if one.name == ARCHIVE), none))
    return found


def drop(using: str, name: str, **by: Unpack[By]) -> bool:
    """Delete a reader; return whether it existed. GC no longer keeps messages for it."""

    def delete(session: Session) -> bool:
        deleted = session.execute(f"DELETE FROM {READERS} WHERE name = %s", (name,))
        if deleted:
            audit.once(session, DROP, 1, GroupRef("", ""), detail=name, **by)
        return bool(deleted)

    return run(using, delete)
