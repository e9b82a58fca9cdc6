"""A trigger of a user on the log: the log refuses a message that the outbox has let in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.db import connections

from tests.support.harness import USING

PAYLOAD = "bad"
"""The payload that is refused."""
REASON = "no bad ones"
"""What the trigger says."""
_SQLITE = (
    "CREATE TRIGGER refusing BEFORE INSERT ON queue_messages WHEN NEW.payload = X'{}' "
    "BEGIN SELECT RAISE(ABORT, '{}'); END"
)
_MYSQL = (
    "CREATE TRIGGER refusing BEFORE INSERT ON queue_messages FOR EACH ROW IF NEW.payload = X'{}' THEN "
    "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{}'; END IF"
)


def is_refused(payload: bytes) -> bool:
    return payload == f'"{PAYLOAD}"'.encode()


def stop(using: str = USING) -> None:
    """Drops the trigger: the cause is fixed."""
    with connections[using].cursor() as cursor:
        cursor.execute("DROP TRIGGER IF EXISTS refusing")


@contextlib.contextmanager
def refusing(using: str = USING) -> Iterator[None]:
    """The log has the trigger."""
    create = _SQLITE if connections[using].vendor == "sqlite" else _MYSQL
    with connections[using].cursor() as cursor:
        cursor.execute(create.format(f'"{PAYLOAD}"'.encode().hex(), REASON))
    try:
        yield
    finally:
        stop(using)
