"""The state of the queue: read once for all viewers, of one database or of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from django.utils import timezone, translation
from django.utils.translation import ngettext

from django_mysqlqueue.admin.shared import shared
from django_mysqlqueue.inspection import (
    PAGES,
    Bounds,
    QueueStatus,
    StallTimes,
    find_problems,
    get_overview,
)
from django_mysqlqueue.inspection.bounds import STALL_TIMES
from django_mysqlqueue.inspection.causes import QueueState, state_of, unavailable, with_notes
from django_mysqlqueue.inspection.trends import with_samples
from django_mysqlqueue.sql.several import ANSWER_SECONDS, Unread, read_each


def read_shared(using: str, bounds: Bounds, stall_times: StallTimes) -> QueueState:
    """Read the state of a database, or return what another request has read within two seconds."""

    def read() -> QueueState:
        found = with_samples(get_overview(using=using, bounds=bounds))
        return state_of(found, find_problems(found, stall_times=stall_times))

    # Texts of problems are in the reader's language and time zone.
    where = (translation.get_language(), timezone.get_current_timezone_name())
    return shared.get(("overview", using, bounds, stall_times, *where), read)


def read_status(aliases: Sequence[str]) -> QueueStatus:
    """Return the state of one or several databases, within a few seconds: pages of others must not wait for longer."""

    def read(alias: str) -> QueueStatus:
        return read_shared(alias, PAGES, STALL_TIMES).status

    answers = read_each(aliases, read, within=ANSWER_SECONDS)
    found = {
        alias: unavailable(alias, one.reason) if isinstance(one, Unread) else one for alias, one in answers.items()
    }
    return found[aliases[0]] if len(aliases) == 1 else worst(found)[1]


def worst(found: Mapping[str, QueueStatus]) -> tuple[str, QueueStatus]:
    """Return the state of several databases, with the one whose problem is the worst: stopped if all of them are."""
    order = ("stopped", "degraded", "ok")

    def rank(one: QueueStatus) -> tuple[int, ...]:
        return (order.index(one.state), *(one.cause.rank if one.cause is not None else ()))

    alias, status = min(found.items(), key=lambda item: rank(item[1]))
    if status.state == "ok":
        databases = ngettext("%(number)s database", "%(number)s databases", len(found)) % {"number": len(found)}
        notes = [
            replace(one.cause, text=f"{name}: {one.cause.text}") for name, one in found.items() if one.cause is not None
        ]
        return alias, replace(status, text=with_notes(f"{databases}.", notes))
    are_all_stopped = all(one.state == "stopped" for one in found.values())
    return alias, replace(status, state="stopped" if are_all_stopped else "degraded", text=f"{alias}: {status.text}")
