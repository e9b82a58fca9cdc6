"""A sequencer that somebody holds up: the log says once who does."""

from __future__ import annotations

import logging
import time

from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.service import open_transactions, sequencing
from django_mysqlqueue.sql.session import Session

BLOCKED_AFTER = 15.0
"""Seconds for which others must have held the mutex, and nobody have moved messages."""


class BlockedSequencer:
    """Watches the passes of one poller. Nothing is read while they succeed, or others move messages.

    Args:
        using: alias of the queue's database.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._since: float | None = None
        """Since when the mutex has been held by others, or was last found to be in use, by the monotonic clock."""
        self._told = False

    def passed(self, *, busy: bool) -> None:
        """Note a pass of the sequencer."""
        now = time.monotonic()
        if not busy:
            self._since, self._told = None, False
        elif self._since is None:
            self._since = now
        elif not self._told and now - self._since >= BLOCKED_AFTER:
            self._since = now
            self._tell()

    def _tell(self) -> None:
        session = Session(self._using)
        seconds = sequencing.idle_for(session)
        if seconds < BLOCKED_AFTER:
            return
        self._told = True
        found = open_transactions.sequencer_holder(session, least=BLOCKED_AFTER)
        if found is None:
            event(logging.WARNING, "sequencer.blocked", seconds=round(seconds), connection="not shown by the server")
            return
        event(
            logging.WARNING,
            "sequencer.blocked",
            seconds=round(seconds),
            connection=found.connection,
            user=found.user,
            open=found.age,
            certain=found.is_certain,
        )
