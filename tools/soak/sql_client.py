"""A consumer in plain SQL, beside the subscribers: it calls the stored procedures, as docs/howto/sql.md describes.

    python -m soak.sql_client

It does with each message what the handlers do, and writes the same records.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
import MySQLdb

from soak import plan, records
from soak.plan import Group

CLAIMED = 5
"""Maximum number of messages per claim."""
FRESH = plan.LEASE * 0.4
"""Seconds after a claim for which a delivery certainly is the client's. Later, it is extended first."""
PAUSE = 0.1
REPEATABLE = (1205, 1213)
"""The page says: repeat a call that fails with these errors."""
REFUSED = 1644
INSERT_EFFECT = "INSERT INTO soak_effects (consumer_group, message_id) VALUES (%s, %s)"
Row = dict[str, Any]


def say(level: str, event: str) -> None:
    print(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} {level} {event}", flush=True)


class Connection:
    """A connection, and the calls of the procedures."""

    def __init__(self) -> None:
        self._raw = MySQLdb.connect(
            unix_socket=os.environ["SOAK_SOCKET"], user="root", db="mysqlqueue", charset="utf8mb4", autocommit=True
        )
        self.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def run(self, statement: str, *values: Any) -> list[Row]:
        """Return the rows of the first result."""
        with self._raw.cursor() as cursor:
            cursor.execute(statement, values)
            found = [] if cursor.description is None else list(cursor.fetchall())
            names = [column[0] for column in cursor.description or ()]
            while cursor.nextset():
                pass
        return [dict(zip(names, row, strict=True)) for row in found]

    def call(self, procedure: str, group: Group, *values: Any) -> list[Row]:
        """Call a procedure outside of a transaction."""
        marks = ", ".join(["%s"] * (2 + len(values)))
        for attempt in range(6):
            try:
                return self.run(f"CALL {procedure}({marks})", group.name, group.topic, *values)
            except MySQLdb.Error as error:
                if error.args[0] not in REPEATABLE or attempt == 5:
                    raise
                say("WARNING", f"client.repeats procedure={procedure} error={error.args}")
                time.sleep(PAUSE)
        raise AssertionError

    def settle(self, procedure: str, group: Group, *values: Any) -> str:
        (row,) = self.call(procedure, group, *values)
        return str(row["result"])

    def close(self) -> None:
        with contextlib.suppress(MySQLdb.Error):
            self._raw.close()


class Client:
    """Claim and settle, for all groups that clients in plain SQL work for."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._folder = Path(os.environ["SOAK_FOLDER"])

    def run(self) -> None:
        """Work until the client is stopped. After an error of the connection, connect again."""
        while not self._stop.is_set():
            connection = None
            try:
                connection = Connection()
                self._work(connection)
            except MySQLdb.Error as error:
                level = "ERROR" if error.args[0] == REFUSED else "WARNING"
                say(level, f"client.disconnected error={error.args}")
                time.sleep(PAUSE)
            finally:
                if connection is not None:
                    connection.close()

    def _work(self, connection: Connection) -> None:
        say("INFO", "client.started")
        while not self._stop.is_set():
            found = 0
            for group in plan.SQL_GROUPS:
                since = records.now()
                rows = connection.call("queue_claim", group, CLAIMED)
                found += len(rows)
                for row in rows:
                    self._take(connection, group, row, since)
            if not found:
                self._stop.wait(PAUSE)

    def _take(self, connection: Connection, group: Group, row: Row, since: float) -> None:
        if self._stop.is_set():
            connection.settle("queue_snooze", group, row["handle"], 0)
            return
        if records.now() - since > FRESH:
            # A frozen client cannot know what has happened meanwhile.
            before = records.now()
            extended = connection.settle("queue_extend", group, row["handle"], 8) == "extended"
            if not extended or records.now() - before > FRESH:
                return
        with self._noted(group, row):
            self._handle(connection, group, row)

    @contextlib.contextmanager
    def _noted(self, group: Group, row: Row) -> Iterator[None]:
        self._note(records.STARTED, group, row)
        try:
            yield
        except BaseException:
            self._note(records.LEFT, group, row)
            raise

    def _note(self, verb: str, group: Group, row: Row) -> None:
        from django_mysqlqueue.names.keys import lane

        key = lane(row["key"] or "", row["priority"])
        at = plan.place(plan.HOME, row["offset"])
        process = f"{records.me()}{records.SQL}"
        step = records.Step(verb, row["id"], key, at, row["attempt"], records.now(), process)
        records.write(records.group_file(self._folder, group.name), [step])

    def _handle(self, connection: Connection, group: Group, row: Row) -> None:
        inside = json.loads(row["payload"])
        if inside.get(plan.NAME_INSIDE) != row["id"]:
            self._note(records.WRONG, group, row)
        elif plan.REPEAT in inside:
            self._note(records.AGAIN, group, row)
        if plan.is_slow(group.name, row["id"]):
            time.sleep(plan.SLOW)
        fate, is_first = plan.fate(group.name, row["id"]), row["attempt"] == 1
        if fate == plan.POISON or (is_first and fate in (plan.FLAKY, plan.PUT_OFF)):
            self._note(records.FAILED, group, row)
            delay = 0.3 if fate == plan.PUT_OFF else None
            connection.settle("queue_nack", group, row["handle"], f"Planned: {fate}", delay)
            return
        rejects = fate == plan.REJECT
        call = ("queue_reject", group, row["handle"], "as planned") if rejects else ("queue_ack", group, row["handle"])
        if not group.atomic:
            self._note(records.REJECTED if rejects else records.DONE, group, row)
            connection.settle(*call)
            return
        for _ in range(6):
            try:
                self._settle_with_effect(connection, row, *call)
                break
            except MySQLdb.Error as error:
                if error.args[0] not in REPEATABLE:
                    raise
                connection.run("ROLLBACK")
                say("WARNING", f"client.repeats procedure={call[0]} error={error.args}")
        self._note(records.REJECTED if rejects else records.DONE, group, row)

    def _settle_with_effect(self, connection: Connection, row: Row, procedure: str, group: Group, *values: Any) -> None:
        """Commit the effect and the outcome together."""
        from soak.app import traps

        marks = ", ".join(["%s"] * (2 + len(values)))
        connection.run("START TRANSACTION")
        connection.run(INSERT_EFFECT, group.name, row["id"])
        (found,) = connection.run(f"CALL {procedure}({marks})", group.name, group.topic, *values)
        traps.come_by("client")
        connection.run("ROLLBACK" if found["result"] == "stale" else "COMMIT")


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    django.setup()
    Client(stop).run()


if __name__ == "__main__":
    main()
