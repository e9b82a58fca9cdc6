"""The databases of the queue: which one a topic is in, and which one a caller's transaction is on."""

from __future__ import annotations

from django.db import connections, router

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.models import OutboxMessage
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.sql.connection import in_transaction, is_server, named_place, used_connections


def queue_alias(using: str | None = None, *, topic: str | None = None) -> str:
    """Return the alias of the queue's database, or of the one that a topic is in.

    ``using``: the alias, if the caller names one. ``topic``: the topic. ``DATABASE`` of its entry in ``TOPICS`` counts
    before the general setting.

    Returns:
        ``using``, else the alias in ``TOPICS``, else ``MYSQLQUEUE["DATABASE"]``, else the router's choice.

    Raises:
        InvalidMessage: ``DATABASES`` does not contain ``using``.
    """
    if using is not None:
        if using not in connections:
            raise InvalidMessage(f"using {using!r}: there is no such database in DATABASES")
        return using
    settings = get_settings()
    alias = settings.database if topic is None else settings.database_of(topic)
    return alias or router.db_for_write(OutboxMessage)


def works_on(topic: str) -> list[str]:
    """Return the databases in which subscribers handle a topic's messages: its own first, and those that it leaves.

    In those (``VIA``, ``MOVES_FROM``) its groups are registered only until it has moved (``operations.moving``).
    """
    settings = get_settings()
    found = settings.topics.of(topic.removesuffix(settings.dlq_suffix))
    others = (alias for alias in (found.via, found.moves_from) if alias is not None)
    return list(dict.fromkeys([queue_alias(topic=topic), *others]))


def queue_aliases() -> list[str]:
    """Return the aliases of all databases that have topics or outboxes of this project, the general one first."""
    return list(dict.fromkeys([queue_alias(), *get_settings().topics.aliases()]))


def same_databases() -> tuple[str, str] | None:
    """Return two aliases of the queue that surely lead to one database, or None, without a query.

    Each must have one of its own. Otherwise two workers of a process would take each other's leases for their own.
    One database can be spelled in two ways: a connection tells by the id of the log (``sequencing.log_id``).
    """
    seen: dict[tuple[str, ...], str] = {}
    aliases = queue_aliases()
    # To say where a database is, a backend may ask others, such as for a password.
    for alias in aliases if len(aliases) > 1 else ():
        connection = connections[alias]
        place = named_place(connection)
        if not is_server(connection) and place[1] in ("", ":memory:"):
            continue  # Each connection has one of its own, or none.
        if place in seen:
            return seen[place], alias
        seen[place] = alias
    return None


def transaction_elsewhere(alias: str) -> str | None:
    """Return another database that has an open transaction, if the queue's has none; otherwise None."""
    queue = connections[alias]
    if in_transaction(queue):
        return None
    for connection in used_connections():
        if connection is not queue and in_transaction(connection):
            return connection.alias
    return None
