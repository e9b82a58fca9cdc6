"""What clients in plain SQL do: each call of a procedure is one step, which may be several transactions."""

from __future__ import annotations

from typing import Any

from django.db import OperationalError, connections, transaction

from tests.crash.crashes import ALIAS
from tests.crash.worlds import G
from tests.interleavings.operations import Actor, operation

REFUSED = 1644
"""The error of ``queue__refuse``."""


def call(procedure: str, *values: Any) -> list[dict[str, Any]]:
    """Returns the rows of the first result."""
    with connections[ALIAS].cursor() as cursor:
        # What the session remembers is from a schedule before.
        cursor.execute("SET @queue__idle = NULL")
        marks = ", ".join(["%s"] * (len(G) + len(values)))
        try:
            cursor.execute(f"CALL {procedure}({marks})", (*G, *values))
        except OperationalError as error:
            if error.args[0] != REFUSED:
                raise
            return [{"refused": True}]
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        while cursor.nextset():
            pass
        return rows


def outcome(a: Actor, procedure: str, message: str, *values: Any) -> str:
    held = a.start.held[message]
    (row,) = call(procedure, f"{held.offset}:{held.token}", *values)
    return str(row["result"])


@operation("claim in SQL", steps=True)
def _(a: Actor) -> object:
    rows = call("queue_claim", 100)
    if rows and "refused" in rows[0]:
        return "refused"
    for row in rows:
        a.tokens.setdefault(int(row["handle"].split(":")[1]), f"{a.name}sql")
    return [[row["offset"], row["attempt"]] for row in rows]


@operation("ack in SQL", settles="a1", steps=True)
def _(a: Actor) -> object:
    return outcome(a, "queue_ack", "a1")


@operation("ack in SQL in a transaction", settles="a1", steps=True)
def _(a: Actor) -> object:
    with transaction.atomic(ALIAS):
        return outcome(a, "queue_ack", "a1")


@operation("nack in SQL", steps=True)
def _(a: Actor) -> object:
    return outcome(a, "queue_nack", "a3", "no", 20)


@operation("reject in SQL", settles="a3", steps=True)
def _(a: Actor) -> object:
    return outcome(a, "queue_reject", "a3", "no")


@operation("extend in SQL", steps=True)
def _(a: Actor) -> object:
    return outcome(a, "queue_extend", "a1", 60)
