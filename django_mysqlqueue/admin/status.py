"""The state of the queue: read once for all viewers, of one database or of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from django.utils import timezone, translation
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue.admin.shared import shared
from django_mysqlqueue.inspection import (
    PAGES,
    Bounds,
    Problem,
    QueueOverview,
    QueueStatus,
    StallTimes,
    find_causes,
    find_problems,
    get_overview,
    status_of,
)
from django_mysqlqueue.inspection.bounds import STALL_TIMES
from django_mysqlqueue.inspection.sampled import with_samples
from django_mysqlqueue.inspection.status import unavailable
from django_mysqlqueue.sql.several import ANSWER_SECONDS, Unread, read_each


def read_shared(using: str, bounds: Bounds, stall_times: StallTimes) -> tuple[QueueOverview, list[Problem]]:
    """Read the state of a database and its problems, or return what another request has read within two seconds.

    Args:
        using: alias of the database.
        bounds: limits of how much is read.
        stall_times: times after which a lack of progress is a problem.
    """

    def read() -> tuple[QueueOverview, list[Problem]]:
        found = with_samples(get_overview(using=using, bounds=bounds))
        return found, find_problems(found, stall_times=stall_times)

    # Texts of problems are in the reader's language and time zone.
    where = (translation.get_language(), timezone.get_current_timezone_name())
    return shared.get(("overview", using, bounds, stall_times, *where), read)


def read_status(aliases: Sequence[str]) -> QueueStatus:
    """Return the state of one or several databases, within a few seconds: pages of others must not wait for longer.

    Args:
        aliases: the databases.
    """

    def read(alias: str) -> QueueStatus:
        found, problems = read_shared(alias, PAGES, STALL_TIMES)
        return status_of(found, find_causes(found, problems))

    answers = read_each(aliases, read, within=ANSWER_SECONDS)
    found = {
        alias: unavailable(alias, one.reason) if isinstance(one, Unread) else one for alias, one in answers.items()
    }
    return found[aliases[0]] if len(aliases) == 1 else worst(found)[1]


def worst(found: Mapping[str, QueueStatus]) -> tuple[str, QueueStatus]:
    """Return the state of several databases, with the one whose problem is the worst: stopped if all of them are.

    Args:
        found: the state of each.
    """
    order = ("stopped", "degraded", "ok")
    alias, status = min(found.items(), key=lambda item: order.index(item[1].state))
    if status.state == "ok":
        databases = ngettext("%(number)s database", "%(number)s databases", len(found)) % {"number": len(found)}
        return alias, replace(status, text=_("%(databases)s. No problems found.") % {"databases": databases})
    are_all_stopped = all(one.state == "stopped" for one in found.values())
    return alias, replace(status, state="stopped" if are_all_stopped else "degraded", text=f"{alias}: {status.text}")
