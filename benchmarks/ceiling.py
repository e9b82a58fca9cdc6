"""The ceiling: the same row writes as hand-written SQL on the driver alone. No queue on these tables can be faster.

It uses the same tables, indexes and transactions, and builds the text of each statement once. It does no checks, calls
no handlers and does not use Django. Like the protocol, a claim locks the offsets row of each of its partitions.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

NOW = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)"


def connect() -> Any:
    """Return a mysqlclient connection at READ COMMITTED with autocommit off."""
    import os

    import MySQLdb

    parts = urlsplit(os.environ["DATABASE_URL"])
    query = parse_qs(parts.query)
    options: dict[str, Any] = {"user": parts.username, "db": parts.path.strip("/"), "charset": "utf8mb4"}
    if "unix_socket" in query:
        options["unix_socket"] = query["unix_socket"][0]
    else:
        options |= {"host": parts.hostname, "port": parts.port or 3306, "passwd": parts.password or ""}
    connection = MySQLdb.connect(**options)
    cursor = connection.cursor()
    cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    connection.commit()
    return connection


def row(topic: str, number: int, partitions: int, payload: dict[str, Any]) -> tuple[Any, ...]:
    body = json.dumps({"n": number, **payload}, separators=(",", ":")).encode()
    return (topic, f"k{number % partitions}", f"id-{number:030}", body, '{"content_type": "application/json"}')


COLUMNS = "topic, partition_key, id, payload, metadata"


def publish_one_by_one(connection: Any, rows: list[tuple[Any, ...]], *, transactions: bool) -> None:
    """Insert each row in its own transaction (BEGIN, INSERT, COMMIT), or with one autocommitted statement."""
    connection.autocommit(not transactions)
    cursor = connection.cursor()
    sql = f"INSERT INTO queue_outbox ({COLUMNS}) VALUES (%s, %s, %s, %s, %s)"
    for values in rows:
        if transactions:
            cursor.execute("BEGIN")
        cursor.execute(sql, values)
        if transactions:
            cursor.execute("COMMIT")
    connection.autocommit(False)


def publish_many(connection: Any, rows: list[tuple[Any, ...]], size: int) -> None:
    """Insert rows with multi-row statements, each of which commits by itself."""
    connection.autocommit(True)
    cursor = connection.cursor()
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        sql = f"INSERT INTO queue_outbox ({COLUMNS}) VALUES " + ",".join(["(%s,%s,%s,%s,%s)"] * len(part))
        cursor.execute(sql, [value for values in part for value in values])
    connection.autocommit(False)


COPIED = (
    "topic, partition_key, id, payload, metadata, publisher_key, expires_at, coalesce_key, target_group, original_id, "
    "original_topic, original_offset, failed_group, failed_at, failure_count, last_error, created_at"
)


def sequence(connection: Any, size: int) -> int:
    """Run the sequencer once. Return the number of rows that it moved."""
    cursor = connection.cursor()
    cursor.execute("SELECT id FROM queue_sequencer WHERE id = 1 FOR UPDATE SKIP LOCKED")
    cursor.execute(
        "SELECT outbox_id FROM queue_outbox FORCE INDEX (queue_outbox_due) WHERE deliver_at = 0 "
        "ORDER BY priority DESC, outbox_id LIMIT %s",
        (size,),
    )
    ids = [found for (found,) in cursor.fetchall()]
    if ids:
        places = ",".join(map(str, ids))
        cursor.execute(
            f"INSERT INTO queue_messages ({COPIED}, published_at) SELECT {COPIED}, {NOW} "
            f"FROM queue_outbox FORCE INDEX (PRIMARY) WHERE outbox_id IN ({places}) ORDER BY outbox_id"
        )
        values = f"SELECT {ids[0]} AS id" + "".join(f" UNION ALL SELECT {found}" for found in ids[1:])
        cursor.execute(f"DELETE s FROM ({values}) v STRAIGHT_JOIN queue_outbox s ON s.outbox_id = v.id")
        cursor.execute(f"UPDATE queue_sequencer SET last_offset = last_offset + %s, sequenced_at = {NOW}", (len(ids),))
    connection.commit()
    return len(ids)


def create_offsets(connection: Any, group: str, topic: str, partitions: int) -> None:
    cursor = connection.cursor()
    for number in range(partitions):
        cursor.execute(
            "INSERT INTO queue_offsets "
            "(consumer_group, topic, partition_key, offset_acked, offset_claimed, updated_at) "
            f"VALUES (%s, %s, %s, 0, 0, {NOW}) ON DUPLICATE KEY UPDATE topic = queue_offsets.topic",
            (group, topic, f"k{number}"),
        )
    connection.commit()


class Consumer:
    """Claims from its partitions in turn and acks with the next claim, as a subscriber does."""

    def __init__(self, connection: Any, group: str, topic: str, partitions: int, batch: int, *, depth: int = 1) -> None:
        self.connection = connection
        self.group = group
        self.topic = topic
        self.keys = [f"k{number}" for number in range(partitions)]
        self.batch = batch
        self.depth = depth
        """Minimum number of messages to claim from a partition, if it has that many."""
        self.held: dict[str, list[int]] = {}
        self._turn = 0

    def step(self) -> int:
        """Settle the last batch and claim the next one, in one transaction. Return the size of the new batch."""
        count = min(len(self.keys), self.batch // self.depth, 100)
        keys = [self.keys[(self._turn + place) % len(self.keys)] for place in range(count)]
        self._turn += count
        each = max(1, self.batch // count)
        touched = sorted({*keys, *self.held})
        cursor = self.connection.cursor()
        names = " UNION ALL SELECT ".join(["%s"] * len(touched)).replace("%s", "%s AS k", 1)
        cursor.execute(
            f"SELECT s.partition_key, s.offset_claimed FROM (SELECT {names}) v STRAIGHT_JOIN queue_offsets s "
            "ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k FOR UPDATE",
            (*touched, self.group, self.topic),
        )
        cursors = dict(cursor.fetchall())
        if self.held:
            rows = [(key, offset) for key in sorted(self.held) for offset in self.held[key]]
            values = " UNION ALL SELECT ".join(["%s,%s"] * len(rows)).replace("%s,%s", "%s AS k,%s AS o", 1)
            cursor.execute(
                f"DELETE s FROM (SELECT {values}) v STRAIGHT_JOIN queue_delivery_state s ON s.consumer_group = %s "
                "AND s.topic = %s AND s.partition_key = v.k AND s.message_offset = v.o",
                [value for pair in rows for value in pair] + [self.group, self.topic],
            )
        acked, self.held = self.held, {}
        one = (
            "(SELECT partition_key, `offset` FROM queue_messages FORCE INDEX (queue_messages_partition) "
            "WHERE topic = %s AND partition_key = %s AND `offset` > %s ORDER BY `offset` LIMIT %s)"
        )
        cursor.execute(
            " UNION ALL ".join([one] * len(keys)),
            [value for key in keys for value in (self.topic, key, cursors[key], each)],
        )
        found = cursor.fetchall()
        if found:
            values = " UNION ALL SELECT ".join(["%s,%s"] * len(found)).replace("%s,%s", "%s AS k,%s AS o", 1)
            cursor.execute(
                "INSERT INTO queue_delivery_state (consumer_group, topic, partition_key, message_offset, "
                "delivery_token, delivered_by, delivered_at, invisible_until) "
                f"SELECT %s, %s, v.k, v.o, 123456789, 'ceiling', 1, 1 FROM (SELECT {values}) v",
                [self.group, self.topic, *(value for pair in found for value in pair)],
            )
            for key, offset in found:
                self.held.setdefault(key, []).append(offset)
        self._store(cursors, acked)
        self.connection.commit()
        if found:
            offsets = ",".join(str(offset) for _, offset in found)
            cursor.execute(f"SELECT `offset`, id, payload, metadata FROM queue_messages WHERE `offset` IN ({offsets})")
            cursor.fetchall()
            self.connection.commit()
        return len(found)

    def _store(self, cursors: dict[str, int], acked: dict[str, list[int]]) -> None:
        """Update watermarks and positions with one statement."""
        places = []
        for key in sorted({*acked, *self.held}):
            claimed = self.held[key][-1] if key in self.held else cursors[key]
            # Messages that this step does not ack were acked by the previous one, so the watermark is the position.
            places += [key, acked[key][-1] if key in acked else cursors[key], claimed]
        if not places:
            return
        terms = " UNION ALL SELECT ".join(["%s,%s,%s"] * (len(places) // 3))
        self.connection.cursor().execute(
            f"UPDATE (SELECT {terms.replace('%s,%s,%s', '%s AS k,%s AS a,%s AS c', 1)}) v "
            "STRAIGHT_JOIN queue_offsets s ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k "
            f"SET s.offset_acked = v.a, s.offset_claimed = v.c, s.updated_at = {NOW}",
            [*places, self.group, self.topic],
        )
