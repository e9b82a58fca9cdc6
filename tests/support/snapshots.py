"""All rows of the queue, put back as often as an experiment begins anew."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db import connection, transaction

from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS, TABLES, empty


class Snapshot:
    """The rows as they are when it is made."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, list[Any]]] = {}
        """Table → the INSERT that puts its rows back, and its parameters; no parameters: it was empty."""
        for model in (*QUEUE_MODELS, Effect):
            table = model._meta.db_table
            fields = [one for one in model._meta.concrete_fields if not one.generated]
            columns = ", ".join(connection.ops.quote_name(one.column) for one in fields)
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {columns} FROM {table}")
                rows = list(cursor.fetchall())
            values = ", ".join(f"({', '.join(['%s'] * len(fields))})" for _ in rows)
            self._rows[table] = (f"INSERT INTO {table} ({columns}) VALUES {values}", [v for row in rows for v in row])

    def restore(self, changed: Collection[str] | None = None) -> None:
        """Puts tables back.

        Args:
            changed: only these; None: all.
        """
        if changed is not None and not changed:
            return
        with transaction.atomic(), connection.cursor() as cursor:
            if changed is None:
                empty()
            else:
                for table in sorted(changed):
                    cursor.execute(f"DELETE FROM {table}")
            for table in TABLES if changed is None else sorted(changed):
                insert, parameters = self._rows[table]
                if parameters:
                    cursor.execute(insert, parameters)
