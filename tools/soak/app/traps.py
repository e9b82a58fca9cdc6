"""Traps: places in the code where the killer waits for a process.

The killer arms a trap by creating a file. The first process that reaches the place renames the file to one with its
pid, and waits until the killer has frozen or killed it and has deleted the file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db.backends.signals import connection_created

from django_mysqlqueue.models import (
    DeliveryState,
    JobResult,
    JobStage,
    OutboxMessage,
    RelayPosition,
    RelayWatermark,
    Schedule,
)

LONGEST = 5.0
"""Maximum number of seconds that a process waits, in case the killer itself has ended."""

Execute = Callable[[str, Any, bool, dict[str, Any]], Any]


def folder() -> Path:
    return Path(os.environ["SOAK_FOLDER"]) / "traps"


def come_by(name: str) -> None:
    """Wait in the trap of this name, if it is armed."""
    caught = folder() / f"{name}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        (folder() / name).rename(caught)
        until = time.monotonic() + LONGEST
        while caught.exists() and time.monotonic() < until:
            time.sleep(0.002)


def watch_statements() -> None:
    """Watch the statements of every connection for those inside the package's transactions."""
    connection_created.connect(_wrap, dispatch_uid="soak.traps")


def _wrap(*, connection: Any, **kwargs: Any) -> None:
    if _watch not in connection.execute_wrappers:
        connection.execute_wrappers.append(_watch)


def _watch(execute: Execute, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:  # noqa: FBT001
    place = _place(sql)
    if place is not None:
        come_by(place)
    return execute(sql, params, many, context)


def _place(sql: str) -> str | None:
    """Return the trap of a statement in the middle of a transaction, when locks are held and some rows are written."""
    if sql.startswith("DELETE s") and OutboxMessage._meta.db_table in sql:
        return "sequencer"
    if sql.startswith(f"INSERT INTO {DeliveryState._meta.db_table} "):
        return "claim"
    if sql.startswith("DELETE s") and DeliveryState._meta.db_table in sql:
        return "watermark"  # it was stored before its rows are deleted
    if sql.startswith(f"UPDATE {RelayPosition._meta.db_table} "):
        return "relay"  # the messages have been inserted, the position has not been stored
    if sql.startswith(f"INSERT INTO {RelayWatermark._meta.db_table} "):
        return "relayed"  # the messages and the position are committed, but the source does not know
    if sql.startswith(f"UPDATE {Schedule._meta.db_table} SET last_tick"):
        return "tick"  # its messages have been inserted, the row has not been moved
    if sql.startswith("UPDATE ") and f"status = '{JobResult.Status.RUNNING}'" in sql.partition(" WHERE ")[0]:
        return "begin"  # the results are locked, none is changed
    if sql.startswith(f"UPDATE {JobStage._meta.db_table} "):
        return "stage"  # the results have ended, the stage does not know
    return None
