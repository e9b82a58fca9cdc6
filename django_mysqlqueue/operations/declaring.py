"""What all operations have in common: who runs one, why, where, and whether it only previews the change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NamedTuple, Required, TypedDict

from django.db import connections

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.arguments import REASON_LENGTH, text
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.sql.connection import apart


class How(TypedDict, total=False):
    """The keyword arguments that all operations take after their own."""

    actor: Required[Annotated[str, "who runs the operation, for the audit log."]]
    reason: Annotated[str, "why, for the audit log.", ""]
    using: Annotated[
        str | None, "alias of the queue's database (default: ``MYSQLQUEUE[\"DATABASE\"]``, else the router's choice)."
    ]
    dry_run: Annotated[bool, "change nothing; return what would be changed.", False]


class Work(NamedTuple):
    """Where an operation works, for whom, and whether it is only previewed."""

    using: str
    by: By
    dry_run: bool


@contextmanager
def operating(how: How, **names: str) -> Iterator[Work]:
    """Yield where an operation works, for whom, and whether it is only previewed.

    If the caller has a transaction open on the queue's database, it works on another connection.

    ``names``: further arguments that must be strings: ``group``, ``topic``, ``subscriber``.
    """
    who = by(how["actor"], how.get("reason", ""))
    for name, value in names.items():
        text(name, value, most=KEY_LENGTH)
    using = how.get("using")
    if using is not None and using not in connections:
        raise OperationRefused(f"using {using!r}: DATABASES has no such alias")
    alias = queue_alias(using, topic=names.get("topic"))
    with apart(alias):
        yield Work(alias, who, bool(how.get("dry_run")))


def by(actor: str, reason: str = "") -> By:
    """Return who makes a change, and why.

    Raises:
        OperationRefused: one is not a text, or there is no actor.
    """
    if not text("actor", actor, most=KEY_LENGTH).strip():
        raise OperationRefused(f"actor {actor!r}: must not be empty, for the audit log")
    return {"actor": actor, "reason": text("reason", reason, most=REASON_LENGTH)}
