"""Clients in plain SQL: each has a connection of its own, and knows only the procedures."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import MySQLdb
import pytest
from django.db import connections
from django.db.models import F

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState, PartitionLease, SubscriberHeartbeat
from tests.support.harness import USING, lag, sequence
from tests.support.internals import GroupRef, groups
from tests.support.server_sessions import processlist

REF = GroupRef("g", "t")


class Client:
    """A consumer. ``handle`` is what ``queue_claim`` returned."""

    def __init__(self, ref: GroupRef = REF, **options: Any) -> None:
        self.ref = ref
        parameters = connections[USING].get_connection_params()
        self.raw = MySQLdb.connect(**{**parameters, "autocommit": True, **options})

    def run(self, statement: str, *parameters: Any) -> list[dict[str, Any]]:
        """Returns the rows of the first result."""
        with self.raw.cursor() as cursor:
            cursor.execute(statement, parameters)
            rows: list[dict[str, Any]] = []
            first = True
            while True:
                if first and cursor.description:
                    names = [column[0] for column in cursor.description]
                    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
                    first = False
                if not cursor.nextset():
                    return rows

    def claim(self, limit: int = 100) -> list[dict[str, Any]]:
        return self.run("CALL queue_claim(%s, %s, %s)", *self.ref, limit)

    def ack(self, handle: str) -> str:
        return self._result("CALL queue_ack(%s, %s, %s)", handle)

    def nack(self, handle: str, error: str = "boom", delay: float | None = None) -> str:
        return self._result("CALL queue_nack(%s, %s, %s, %s, %s)", handle, error, delay)

    def reject(self, handle: str, error: str = "no") -> str:
        return self._result("CALL queue_reject(%s, %s, %s, %s)", handle, error)

    def snooze(self, handle: str, delay: float = 0) -> str:
        return self._result("CALL queue_snooze(%s, %s, %s, %s)", handle, delay)

    def extend(self, handle: str, seconds: float = 60) -> str:
        return self._result("CALL queue_extend(%s, %s, %s, %s)", handle, seconds)

    def _result(self, statement: str, handle: str, *parameters: Any) -> str:
        (row,) = self.run(statement, *self.ref, handle, *parameters)
        return str(row["result"])

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.run("START TRANSACTION")
        try:
            yield
        except BaseException:
            self.run("ROLLBACK")
            raise
        self.run("COMMIT")

    @property
    def name(self) -> str:
        """The subscriber that the procedures see."""
        (row,) = self.run("SELECT CONCAT('sql:', CONNECTION_ID(), ':', USER()) AS name")
        return str(row["name"])

    def close(self) -> None:
        """Close the connection, and wait until the server has rolled back what it had open."""
        try:
            number = self.raw.thread_id()
            self.raw.close()
        except MySQLdb.Error:
            return  # It was closed before.
        with connections[USING].cursor() as cursor:
            for _ in range(5000):
                cursor.execute(f"SELECT 1 FROM {processlist()} WHERE id = %s", (number,))
                if cursor.fetchone() is None:
                    return
                time.sleep(0.001)
        raise AssertionError(f"The server still has connection {number}.")


def register(mode: str, ref: GroupRef = REF, **options: Any) -> None:
    groups.register(USING, ref, mode=mode, start="earliest", options=options)


def pass_time(seconds: float) -> None:
    """As if it had passed for everything that waits, and for all heartbeats."""
    milliseconds = int(seconds * 1000)
    DeliveryState.objects.filter(invisible_until__gt=0).update(invisible_until=F("invisible_until") - milliseconds)
    SubscriberHeartbeat.objects.update(heartbeat_at=F("heartbeat_at") - milliseconds)


def publish_numbers(count, keys=3, **options):
    publish_many("t", [Message({"n": n}, key=f"k{n % keys}", **options) for n in range(count)])
    sequence()


def numbers(rows):
    return [json.loads(row["payload"])["n"] for row in rows]


def nothing_is_left():
    return not (DeliveryState.objects.exists() or PartitionLease.objects.exists() or lag())


@contextlib.contextmanager
def holding(client, statement, *parameters):
    """A client has a transaction open, and does not end it."""
    client.run("START TRANSACTION")
    client.run(statement, *parameters)
    yield
    client.run("ROLLBACK")


def impatient(client):
    client.run("SET SESSION innodb_lock_wait_timeout = 1")


def refused(client, *arguments, statement="CALL queue_claim(%s, %s, %s)"):
    with pytest.raises(MySQLdb.Error) as caught:
        client.run(statement, *arguments)
    assert caught.value.args[0] == 1644
    return caught.value.args[1]
