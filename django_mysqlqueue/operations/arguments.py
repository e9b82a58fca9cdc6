"""Rules for the arguments of operations. Each error names the argument, its value and the rule."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

from django.utils.timezone import is_naive, make_aware

from django_mysqlqueue.arguments import is_unicode, shown
from django_mysqlqueue.db.sizes import JOB_PATH_LENGTH, LATEST_DELIVERY
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.names.keys import check_key
from django_mysqlqueue.names.rules import KEY_LENGTH

REASON_LENGTH = 1000
HIGHEST_OFFSET = 2**63 - 1
HIGHEST_RATE = 1_000_000.0
LOWEST_RATE = 0.001


def text(name: str, value: Any, *, most: int) -> str:
    """Return a string if every database can store it."""
    if not isinstance(value, str):
        raise OperationRefused(f"{name} {shown(value)}: must be a str")
    if len(value) > most:
        raise OperationRefused(f"{name} {shown(value)}: {len(value):,} characters, but at most {most:,} are allowed")
    if not is_unicode(value):
        raise OperationRefused(f"{name} {shown(value)}: contains a lone surrogate, which UTF-8 cannot encode")
    return value


def texts(name: str, values: Any) -> list[str]:
    """Return ids or keys as a list without duplicates."""
    return list(dict.fromkeys(text(name, one, most=KEY_LENGTH) for one in _items(name, values)))


def task_path(task: Any) -> str | None:
    """Return the dotted path of a task, or None."""
    if task == "":
        raise OperationRefused("task '': must be the dotted path of a task")
    return None if task is None else text("task", task, most=JOB_PATH_LENGTH)


def key_of(key: Any, task: Any) -> str | None:
    """Return a publisher's key, or the dotted path of a task, which is the key of its jobs; None without both."""
    if key is None:
        return task_path(task)
    if task is not None:
        raise OperationRefused("key, task: pass one of them, since the key of a job is its task")
    try:
        return check_key(key)
    except InvalidMessage as error:
        raise OperationRefused(str(error)) from None


def offsets_of(values: Any, name: str = "offsets") -> list[int]:
    """Return offsets as a list without duplicates."""
    found = _items(name, values)
    for one in found:
        if type(one) is not int or not 0 < one <= HIGHEST_OFFSET:
            raise OperationRefused(f"{name} {shown(one)}: must be an integer from 1 to 2**63 - 1")
    return list(dict.fromkeys(found))


def milliseconds(name: str, moment: Any, *, latest: int | None = None) -> int:
    """Return a datetime as epoch milliseconds; a naive datetime is in the project's time zone."""
    if not isinstance(moment, datetime.datetime):
        raise OperationRefused(f"{name} {shown(moment)}: must be a datetime")
    try:
        found = int((make_aware(moment) if is_naive(moment) else moment).timestamp() * 1000)
    except (OverflowError, ValueError) as error:
        raise OperationRefused(
            f"{name} {shown(moment)}: is not a valid time in the project's time zone ({error})"
        ) from None
    if latest is not None and found > latest:
        raise OperationRefused(f"{name} {shown(moment)}: must be before the year 10000 in UTC")
    return found


def delivery_time(moment: Any, name: str = "deliver_at") -> int:
    """Return a time of delivery as epoch milliseconds.

    ``moment``: the time, at most the latest that ``publish`` accepts.
    """
    return milliseconds(name, moment, latest=LATEST_DELIVERY)


def check_rate(rate: Any) -> None:
    """Require a valid number of messages per second, or None."""
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not math.isfinite(rate) or rate <= 0:
        raise OperationRefused(f"rate {shown(rate)}: must be more than 0 messages per second")
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise OperationRefused(
            f"rate {shown(rate)}: must be from {LOWEST_RATE:g} to {HIGHEST_RATE:,.0f} messages per second"
        )


def check_limit(limit: Any) -> None:
    """Require a valid maximum number of messages, or None."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise OperationRefused(f"limit {shown(limit)}: must be an integer of at least 1")


def _items(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, set, frozenset)):
        raise OperationRefused(f"{name} {shown(values)}: must be a list")
    if not values:
        raise OperationRefused(f"{name} []: must not be empty")
    return list(values)
