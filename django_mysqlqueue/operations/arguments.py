"""The rules for what callers pass to operations: each error names the argument, its value and the rule."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.utils.timezone import is_naive, make_aware

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.limits import LATEST_DELIVERY
from django_mysqlqueue.naming import KEY_LENGTH
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.sql.connection import apart

REASON_LENGTH = 1000
HIGHEST_OFFSET = 2**63 - 1
HIGHEST_RATE = 1_000_000.0
LOWEST_RATE = 0.001
SHOWN = 60
"""An error shows so many characters of a value."""


@contextmanager
def alias_for(using: str | None, actor: str, reason: str, **names: str) -> Iterator[str]:
    """The queue's database alias, on a connection of its own if the caller has a transaction open there.

    Args:
        using: as the caller passed it.
        actor: who does it.
        reason: why.
        names: further arguments that must be texts: ``group``, ``topic``, ``subscriber``.

    Raises:
        OperationRefused: one of them breaks a rule.
    """
    if not text("actor", actor, most=KEY_LENGTH).strip():
        raise OperationRefused(f"actor {actor!r}: must name who does this, for the audit log")
    text("reason", reason, most=REASON_LENGTH)
    for name, value in names.items():
        text(name, value, most=KEY_LENGTH)
    if using is not None and using not in connections:
        raise OperationRefused(f"using {using!r}: there is no such alias in DATABASES")
    alias = queue_alias(using)
    with apart(alias):
        yield alias


def text(name: str, value: Any, *, most: int) -> str:
    """A text that every database can store.

    Raises:
        OperationRefused: it is not a str, longer than ``most`` characters, or holds a lone surrogate.
    """
    if not isinstance(value, str):
        raise OperationRefused(f"{name} {_shown(value)}: must be a str")
    if len(value) > most:
        raise OperationRefused(f"{name} {_shown(value)}: {len(value):,} characters, at most {most:,} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise OperationRefused(f"{name} {_shown(value)}: holds a lone surrogate, which UTF-8 cannot encode") from None
    return value


def texts(name: str, values: Any) -> list[str]:
    """A list of ids or keys, without repetitions.

    Raises:
        OperationRefused: it is not a list (a single str, for example), it is empty, or one of them breaks a rule.
    """
    return list(dict.fromkeys(text(name, one, most=KEY_LENGTH) for one in _items(name, values)))


def offsets_of(values: Any, name: str = "offsets") -> list[int]:
    """A list of offsets, without repetitions.

    Raises:
        OperationRefused: it is not a list, it is empty, or one of them is not a whole number from 1 to 2**63 - 1.
    """
    found = list(dict.fromkeys(_items(name, values)))
    for one in found:
        if type(one) is not int or not 0 < one <= HIGHEST_OFFSET:
            raise OperationRefused(f"{name} {_shown(one)}: must be a whole number from 1 to 2**63 - 1")
    return found


def milliseconds(name: str, moment: Any, *, latest: int | None = None) -> int:
    """Epoch milliseconds of a datetime; a naive one is in the project's time zone.

    Args:
        latest: the latest that is allowed, epoch milliseconds.

    Raises:
        OperationRefused: it is not a datetime, or later than that.
    """
    if not isinstance(moment, datetime.datetime):
        raise OperationRefused(f"{name} {_shown(moment)}: must be a datetime")
    try:
        found = int((make_aware(moment) if is_naive(moment) else moment).timestamp() * 1000)
    except (OverflowError, ValueError) as error:
        raise OperationRefused(f"{name} {_shown(moment)}: is not a time in the project's time zone ({error})") from None
    if latest is not None and found > latest:
        raise OperationRefused(f"{name} {_shown(moment)}: must be before the year 10000 in UTC")
    return found


def delivery_time(moment: Any) -> int:
    """Epoch milliseconds of a time of delivery, at most the latest that ``publish`` takes.

    Raises:
        OperationRefused: as ``milliseconds``.
    """
    return milliseconds("deliver_at", moment, latest=LATEST_DELIVERY)


def check_rate(rate: Any) -> None:
    """Messages per second.

    Raises:
        OperationRefused: it is not a number in range.
    """
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not math.isfinite(rate) or rate <= 0:
        raise OperationRefused(f"rate {_shown(rate)}: must be above 0 messages a second")
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise OperationRefused(f"rate {_shown(rate)}: must be from {LOWEST_RATE:g} to {HIGHEST_RATE:,.0f}")


def check_limit(limit: Any) -> None:
    """How many, at most.

    Raises:
        OperationRefused: it is not a whole number from 1.
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise OperationRefused(f"limit {_shown(limit)}: must be at least 1")


def _items(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, set, frozenset)):
        raise OperationRefused(f"{name} {_shown(values)}: must be a list")
    if not values:
        raise OperationRefused(f"{name} []: must name at least one")
    return list(values)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
