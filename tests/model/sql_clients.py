"""The rules about a client in plain SQL, which shares a group with subscribers. On servers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import MySQLdb
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from django_mysqlqueue.models import DeliveryState
from tests.model.other_database import MOVES, TOPIC
from tests.support.internals import Claimed, GroupRef, lane

if TYPE_CHECKING:
    from tests.model.queue_model import Model
    from tests.support.sql_clients import Client
    from tests.support.still_time import Time

GROUPS = {MOVES.group: {"SQL_TOPICS": [TOPIC], "MAX_ATTEMPTS": 3}}
"""The settings, which the procedures contain."""
OWN_CLOCK = ("DROP PROCEDURE queue__clock", "CREATE PROCEDURE queue__clock() SET @queue__now = @model__now")
"""The procedures read the database's clock, which no session can set: the model's stands in for it."""
REFUSED = 1644
"""The error for a group whose filter or limits the procedures cannot apply."""


class SqlClients(RuleBasedStateMachine):
    """A client. What it has claimed and not settled may be lost with its connection."""

    model: Model
    clock: Time
    client: Client | None = None
    """None on SQLite."""

    def begin(self) -> None:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Claimed] = []
        self.ended_in_sql: set[tuple[GroupRef, int, int]] = set()

    @precondition(lambda self: self.client is not None)
    @rule(
        what=st.sampled_from(["claim", "claim", "claim", "ack", "ack", "nack", "reject", "forget"]),
        which=st.integers(0, 3),
    )
    def in_plain_sql(self, what: str, which: int) -> None:
        """One rule, so that it is not drawn more often than the others."""
        self.begin()
        assert self.client is not None
        # An idle client would look only at what is new.
        self.client.run(f"SET @model__now = {self.clock.now}, @queue__idle = NULL")
        if what == "claim":
            self.claim_in_sql(1 + which)
        elif what == "forget":
            self.held.clear()
        elif self.held:
            self.settle_in_sql(self.held.pop(which % len(self.held)), what)

    def claim_in_sql(self, limit: int) -> None:
        assert self.client is not None
        try:
            rows = self.client.claim(limit)
        except MySQLdb.Error as error:
            assert error.args[0] == REFUSED, error  # noqa: PT017
            return
        for row in rows:
            token = int(row["handle"].split(":")[1])
            key = lane(row["key"] or "", row["priority"])
            suspect = DeliveryState.objects.get(delivery_token=token, message_offset=row["offset"]).suspect
            claimed = Claimed(MOVES, key, row["offset"], token, row["attempt"], suspect, len(row["payload"]))
            assert self.model.start(self.client.name, self.ended_in_sql, claimed, int(row["payload"])) is not None
            self.held.append(claimed)

    def settle_in_sql(self, claimed: Claimed, what: str) -> None:
        """It takes effect if and only if the delivery is still the client's."""
        assert self.client is not None
        is_mine = DeliveryState.objects.filter(
            consumer_group=MOVES.group,
            topic=TOPIC,
            message_offset=claimed.offset,
            delivery_token=claimed.token,
            acked=False,
        ).exists()
        handle = f"{claimed.offset}:{claimed.token}"
        if is_mine:
            self.model.said(claimed, what)
        if what == "ack":
            result, expected = self.client.ack(handle), {"acked"}
        elif what == "nack":
            is_last = claimed.attempt >= self.model.specs[MOVES].max_attempts
            result, expected = self.client.nack(handle), {"dead_lettered" if is_last else "failed"}
        else:
            result, expected = self.client.reject(handle), {"dead_lettered"}
        assert result in (expected if is_mine else {"stale"}), f"{what} of {claimed}, {is_mine=}: {result}"
