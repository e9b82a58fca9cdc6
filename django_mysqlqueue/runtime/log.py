"""Structured log lines: one event each, named ``object.verb``, followed by its details as ``key=value``.

docs/reference/log.md lists all of them. A test compares names, levels and keys.
"""

from __future__ import annotations

import datetime
import logging
import re
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django_mysqlqueue.service.deliveries import Action

if TYPE_CHECKING:
    from django_mysqlqueue.service.deliveries import Claimed, Settlement
    from django_mysqlqueue.service.retention import Orphans

logger = logging.getLogger("django_mysqlqueue.subscriber")
jobs = logging.getLogger("django_mysqlqueue.jobs")
"""The logger of jobs that succeed. Its level switches them off."""
_thread = threading.local()


@contextmanager
def with_database(alias: str | None) -> Iterator[None]:
    """Add ``database`` to the events that this thread logs in the block.

    ``alias``: alias of the database; None to add nothing.
    """
    before = getattr(_thread, "database", None)
    _thread.database = alias
    try:
        yield
    finally:
        _thread.database = before


def event(
    level: int,
    verb: str,
    *,
    to: logging.Logger = logger,
    exc_info: bool | BaseException = False,
    stacks: str | None = None,
    **fields: Any,
) -> None:
    """Log the line ``verb key=value …``.

    The details are also in the record's attribute ``mysqlqueue``, a dict with the verb as ``event``.

    ``level``: a level of ``logging``. ``stacks``: the record's ``stack_info``, which formatters show below the line.
    """
    if not to.isEnabledFor(level):
        return
    database = getattr(_thread, "database", None)
    if database is not None:
        fields.setdefault("database", database)
    text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    # The verb is in the template because Sentry and similar tools group lines by template.
    template, extra = f"{verb} %s", {"mysqlqueue": {"event": verb, **fields}}
    if stacks is None:
        to.log(level, template, text, exc_info=exc_info, extra=extra)
        return
    # ``log()`` accepts only the caller's own stack.
    file, line, function, _ = to.findCaller()
    to.handle(to.makeRecord(to.name, level, file, line, template, (text,), None, function, extra, sinfo=stacks))


def failing(level: int, verb: str, *, failures: int, exc_info: bool = False, **fields: Any) -> None:
    """Log a failure, the one with this number in a row, if it ``is_worth_a_line``."""
    if is_worth_a_line(failures):
        event(level, verb, exc_info=exc_info, **fields, failures=failures)


def is_worth_a_line(failures: int) -> bool:
    """Return whether this failure in a row is logged: the 1st, 2nd, 4th, 8th … An outage does not fill the log."""
    return failures & (failures - 1) == 0


def delivery_fields(claimed: Claimed) -> dict[str, Any]:
    """Return the keys that identify a delivery in a log line, and the job that it is of."""
    fields = {
        "group": claimed.ref.group,
        "topic": claimed.ref.topic,
        "partition": claimed.key,
        "offset": claimed.offset,
        "attempt": claimed.attempt,
    }
    return fields if claimed.job is None else {**fields, "task": claimed.job.task, "id": claimed.job.id}


def dead_lettered(dead: Iterable[tuple[Claimed, str]]) -> None:
    """Log deliveries that were dead-lettered, with the last line of their errors: the dead letter has all of it."""
    for delivery, error in dead:
        text = error.strip().rsplit("\n", 1)[-1]
        event(logging.ERROR, "delivery.dead_lettered", **delivery_fields(delivery), error=text)


def succeeded(settlements: Iterable[Settlement], stale: Collection[Settlement]) -> None:
    """Log the jobs that have succeeded, after their outcomes are committed, with the seconds that their calls took.

    ``stale``: the settlements of which nothing was written.
    """
    if not jobs.isEnabledFor(logging.INFO):
        return
    unwritten = {id(settlement) for settlement in stale}
    for one in settlements:
        name = one.delivery.job
        # Without a ``job``, it had ended before.
        if one.action is Action.ACK and name is not None and one.job is not None and id(one) not in unwritten:
            event(
                logging.INFO,
                "job.succeeded",
                to=jobs,
                task=name.task,
                id=name.id,
                attempt=one.delivery.attempt,
                seconds=one.handled_ms / 1000,
            )


def orphans_deleted(orphans: Orphans) -> None:
    """Log the messages that GC deleted from a topic without a consumer group."""
    event(
        logging.WARNING,
        "orphans.deleted",
        topic=orphans.topic,
        messages=orphans.messages,
        oldest=moment(orphans.oldest_at),
        newest=moment(orphans.newest_at),
    )


def moment(milliseconds: int) -> str:
    """Return a time in epoch milliseconds as ISO 8601, in UTC, to the second."""
    return datetime.datetime.fromtimestamp(milliseconds // 1000, datetime.UTC).isoformat()


def error_line(error: BaseException) -> str:
    """Return an exception as one line.

    ``traceback`` formats it, because an exception's ``__str__`` is user code and may raise.
    """
    return "".join(traceback.format_exception_only(error)).strip().rsplit("\n", 1)[-1]


_NEEDS_QUOTES = re.compile(r"[\s'\"=]")


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or _NEEDS_QUOTES.search(text) else text
