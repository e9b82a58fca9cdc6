"""The state of the queue: read once for all viewers, of one database or of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from django.utils import timezone, translation
from django.utils.translation import ngettext

from django_mysqlqueue.admin.shared import shared
from django_mysqlqueue.inspection import Bounds, QueueOverview, QueueStatus, StallTimes, find_problems, get_overview
from django_mysqlqueue.inspection.causes import QueueState, state_of, with_notes
from django_mysqlqueue.inspection.trends import with_samples


def read_overview(using: str, bounds: Bounds) -> QueueOverview:
    """Read the groups of a database, or return what another request has read within two seconds."""
    return shared.get(("overview", using, bounds), lambda: with_samples(get_overview(using=using, bounds=bounds)))


def read_shared(using: str, bounds: Bounds, stall_times: StallTimes) -> QueueState:
    """Read the state of a database, or return what another request has read within two seconds."""
    found = read_overview(using, bounds)
    # Texts are in the reader's language and time zone, and what was found in another overview is not of this one.
    reader = (translation.get_language(), timezone.get_current_timezone_name())
    key = ("state", using, bounds, stall_times, *reader, found.now)
    return shared.get(key, lambda: state_of(found, find_problems(found, stall_times=stall_times)))


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
