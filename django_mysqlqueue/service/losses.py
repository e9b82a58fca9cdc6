"""The wait of a message whose subscriber was lost.

A row of delivery state without a token waits for another attempt. One with a token is held, or was lost with its
subscriber. ``suspect`` says whether it was claimed as a suspected poison message, so that its start may be recorded: it
is written with the token, by a claim that finds the row with a subscriber, and goes with it.

A loss is nobody's decision. So in ordered mode, a lost message that waits holds its partition until it has ended. Every
outcome of a handler that makes a message wait takes the subscriber's name out of the row.
"""

from __future__ import annotations

from collections.abc import Sequence

from django_mysqlqueue.db.tables import STATE
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session

HELD_BY = "CASE WHEN s.delivery_token = 0 THEN '' ELSE s.delivered_by END"
"""The subscriber that holds a row of delivery state (``s``) or was lost with it, in SQL. A row that waits may still
name its last subscriber, because it is a suspected poison message."""

NOT_HELD = {"delivery_token": "0", "suspect": "0"}
"""The assignments that take the token out of a row of delivery state."""


def wait_ms(retries: int, backoff: Backoff, *, suspect: bool) -> int:
    """Return how long a message waits whose delivery a claim has found lost, in milliseconds.

    The first loss costs nothing. From then on the wait is that after a failed attempt.
    """
    return round(backoff.delay(retries) * 1000) if suspect and retries else 0


def is_lost(token: int, delivered_by: str) -> bool:
    """Return whether a row waits because its subscriber was lost, or released it without starting it since."""
    return not token and bool(delivered_by)


def make_wait(session: Session, ref: GroupRef, waits: Sequence[tuple[str, int, int]], now: int) -> None:
    """Make lost deliveries wait. They remain suspected poison messages, and what their subscribers report is stale."""
    changes = {**NOT_HELD, "delivered_at": "v.at", "invisible_until": "v.until"}
    session.update(STATE, ("k", "o", "until", "at"), [(*wait, now) for wait in waits], BY_ROW, changes, after=ref)
