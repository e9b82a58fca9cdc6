"""Structured log lines: one event, one verb, then its fields as ``name=value``."""

from __future__ import annotations

import datetime
import logging
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_mysqlqueue.service.deliveries import Claimed
    from django_mysqlqueue.service.retention import Orphans

logger = logging.getLogger("django_mysqlqueue.subscriber")


def event(level: int, verb: str, *, exc_info: bool = False, stacks: str | None = None, **fields: Any) -> None:
    """Logs ``verb name=value …``; the fields are also in the record as ``mysqlqueue``.

    ``stacks`` becomes the record's ``stack_info``, which formatters show below the line.
    """
    if not logger.isEnabledFor(level):
        return
    text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    # The verb is in the template: Sentry and the like group lines by it.
    template, extra = f"{verb} %s", {"mysqlqueue": {"event": verb, **fields}}
    if stacks is None:
        logger.log(level, template, text, exc_info=exc_info, extra=extra)
        return
    # ``log()`` takes no stack but the caller's own.
    file, line, function, _ = logger.findCaller()
    logger.handle(
        logger.makeRecord(logger.name, level, file, line, template, (text,), None, function, extra, sinfo=stacks)
    )


def is_worth_a_line(failures: int) -> bool:
    """Of failures in a row the 1st, 2nd, 4th, 8th …: an outage must not fill the log."""
    return failures & (failures - 1) == 0


def delivery_fields(claimed: Claimed) -> dict[str, Any]:
    """What a line says of a delivery."""
    return {
        "group": claimed.ref.group,
        "topic": claimed.ref.topic,
        "partition": claimed.key,
        "offset": claimed.offset,
        "attempt": claimed.attempt,
    }


def orphans_deleted(orphans: Orphans) -> None:
    """Logs what GC has deleted from a topic that no group reads."""
    event(
        logging.WARNING,
        "gc.orphans_deleted",
        topic=orphans.topic,
        messages=orphans.messages,
        oldest=moment(orphans.oldest_at),
        newest=moment(orphans.newest_at),
    )


def moment(milliseconds: int) -> str:
    """A time in epoch milliseconds as ISO 8601, in UTC and to the second."""
    return datetime.datetime.fromtimestamp(milliseconds // 1000, datetime.UTC).isoformat()


def error_line(error: BaseException) -> str:
    """An exception in a line; its ``__str__`` is user code too, and may raise."""
    return "".join(traceback.format_exception_only(error)).strip().rsplit("\n", 1)[-1]


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or any(character.isspace() or character in "'\"=" for character in text) else text
