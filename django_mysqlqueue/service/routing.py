"""Routes: the database to which the sequencer sends the messages of a topic, whichever their publishers knew.

A route is decided under the sequencer's mutex, which all messages of a database pass one after the other. So there is
one offset of the log up to which all messages went one way, and from which on all go the other way. Routes are for
topics that move (``operations.moving``); a topic without one goes where its publishers have sent it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from django_mysqlqueue.db.tables import SEQUENCER, SEQUENCER_ID
from django_mysqlqueue.service.sequencing import identify
from django_mysqlqueue.sql.session import Session

HERE = ""
"""The target of a route whose messages stay in the database."""


class Route(NamedTuple):
    """The way of a topic's messages."""

    target: str
    """Alias of the database to which they are relayed, or ``HERE``."""
    source: str
    """Alias of the database that the topic leaves, or has left."""
    planned: str = ""
    """Alias of the database to which a prepared move will lead; empty if none is prepared."""


def route_of(session: Session, topic: str) -> Route | None:
    """Return the route of a topic, or None."""
    row = session.row(f"SELECT routes FROM {SEQUENCER} WHERE id = %s", (SEQUENCER_ID,))
    return None if row is None else decoded(row[0]).get(topic)


def moved_to(session: Session, topic: str) -> str:
    """Return the alias of the database to which a topic has moved from this one, or an empty string."""
    route = route_of(session, topic)
    return "" if route is None else route.target


def set_route(
    session: Session, topic: str, route: Route | None, *, check: Callable[[Route | None], None] | None = None
) -> int:
    """Set the route of a topic; return the highest offset of the log at that time. Later messages take the route.

    This waits for the sequencer, if it is running.

    ``route``: the route; None: the topic has none any more. ``check``: called with the present route, under the mutex;
    raises an exception to refuse the change.
    """
    identify(session.using)  # The row may be missing.
    row = session.row(
        f"SELECT routes, last_offset FROM {SEQUENCER} WHERE id = %s{session.dialect.for_update}", (SEQUENCER_ID,)
    )
    assert row is not None  # noqa: S101  # It has been inserted.
    changed = decoded(row[0])
    present = changed.pop(topic, None)
    if check is not None:
        check(present)
    if route is not None:
        changed[topic] = route
    session.execute(f"UPDATE {SEQUENCER} SET routes = %s WHERE id = %s", (_encoded(changed), SEQUENCER_ID))
    return int(row[1])


def decoded(value: str | bytes) -> dict[str, Route]:
    """Return routes by topic, from the column of the sequencer's row."""
    return {
        topic: Route(found["to"], found["from"], found.get("planned", "")) for topic, found in json.loads(value).items()
    }


def _encoded(routes: Mapping[str, Route]) -> str:
    return json.dumps(
        {
            topic: {"to": route.target, "from": route.source} | ({"planned": route.planned} if route.planned else {})
            for topic, route in routes.items()
        }
    )
