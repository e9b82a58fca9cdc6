"""The sessions of a server, on which other test runs execute what they like."""

from __future__ import annotations

from django.db import connection

from tests.support.internals import dialect_of


def processlist() -> str:
    """The table of the server's sessions, whose columns can be read without the statements that they execute.

    MySQL's ``information_schema.processlist`` reads these whatever is selected, as utf8mb3: an emoji in any of them is
    an error. ``SHOW PROCESSLIST`` ends them after 100 bytes, and the driver cannot decode half an emoji.
    """
    return f"{'performance' if dialect_of(connection).name == 'mysql' else 'information'}_schema.processlist"
