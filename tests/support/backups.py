"""A database that goes back to an earlier state."""

from __future__ import annotations

from typing import Any

from django.db import connections

from django_mysqlqueue.models import QueueMessage, Sequencer
from tests.support.internals import is_server

LOG = QueueMessage._meta.db_table
TABLES = (
    *(LOG, "queue_outbox", "queue_sequencer", "queue_log_marks"),
    *("queue_relay_watermarks", "queue_relay_positions", "queue_collected"),
)


class Backup:
    """A copy of a database's tables of the queue."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        with connections[alias].cursor() as cursor:
            self.rows = {table: self._read(cursor, table) for table in TABLES}

    @staticmethod
    def _read(cursor: Any, table: str) -> tuple[list[str], list[Any]]:
        cursor.execute(f"SELECT * FROM {table} WHERE 1 = 0")
        generated = ("size", "priority")
        names = [f"`{name}`" for name, *_ in cursor.description if name not in generated]
        cursor.execute(f"SELECT {', '.join(names)} FROM {table}")
        return names, cursor.fetchall()

    def restore(self, *tables: str) -> None:
        """Put it back. As after a failover, offsets are assigned again from the end of the log on."""
        connection = connections[self.alias]
        with connection.cursor() as cursor:
            for table in tables or TABLES:
                names, rows = self.rows[table]
                cursor.execute(f"DELETE FROM {table}")
                insert = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(['%s'] * len(names))})"
                for row in rows:
                    cursor.execute(insert, row)
            end = Sequencer.objects.using(self.alias).values_list("last_offset", flat=True).first() or 0
        continue_after(self.alias, end)


def continue_after(alias: str, offset: int) -> None:
    """Let the next message that enters a log have the next offset."""
    with connections[alias].cursor() as cursor:
        if is_server(connections[alias]):
            cursor.execute(f"ALTER TABLE {LOG} AUTO_INCREMENT = {offset + 1}")
        else:
            cursor.execute(f"UPDATE sqlite_sequence SET seq = {offset} WHERE name = '{LOG}'")
