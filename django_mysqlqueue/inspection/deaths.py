"""Processes that have died, as those that were started in their places recorded it, or as others replaced them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from django_mysqlqueue.db.tables import HEARTBEATS, LOG, RESULTS, STATE
from django_mysqlqueue.inspection.overview import QueueOverview
from django_mysqlqueue.inspection.problem import Problem, age
from django_mysqlqueue.inspection.subscribers import replaced
from django_mysqlqueue.service.heartbeats import FORGET_AFTER_MS
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import duration

REPEATED = 2
"""Number of deaths within the window that are a problem."""
QUIET = 120.0
"""Seconds after the last death after which it is over, unless a message is known that can do it again: four times the
longest pause of a supervisor."""
NAMED = 5
"""Maximum number of messages that are named."""

Handled = tuple[GroupRef, int]
"""A group, and the offset of a message that a process was handling for it."""


@dataclass(frozen=True, slots=True)
class Death:
    """The death of a process. Times are in epoch milliseconds."""

    name: str
    at: int
    """When it was recorded, a moment after the start of the process that replaced it. Without a supervisor: its last
    heartbeat."""
    how: str
    """Its exit status or signal; empty without a supervisor."""
    host: str
    handled: frozenset[Handled]
    """The messages that it was handling."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    """What is known of a message."""

    task: str
    """The path of its task, if it is a job."""
    is_unsettled: bool


def read(session: Session, since: int) -> list[Death]:
    """Return the deaths since a time in epoch milliseconds, oldest first."""
    rows = session.rows(
        "SELECT h.subscriber_name, h.deregistered_at, h.info, h.consumer_group, h.topic "
        f"FROM {HEARTBEATS} h WHERE h.deregistered_at >= %s "
        "ORDER BY h.consumer_group, h.topic, h.subscriber_name",
        (since,),
    )
    found: dict[str, Death] = {}
    for name, at, text, group, topic in rows:
        info = json.loads(text)
        if how := info.get("died"):
            ref = GroupRef(group, topic)
            handled = {(ref, offset) for offset in json.loads(info.get("handled") or "[]")}
            before = found[name].handled if name in found else frozenset[Handled]()
            found[name] = Death(name, at, str(how), str(info.get("host", "")), before | handled)
    return sorted(found.values(), key=lambda death: (death.at, death.name))


def _lost(overview: QueueOverview, since: int) -> list[Death]:
    """Return the lost subscribers that others have replaced: somebody else than a supervisor restarts their processes.

    After an outage of the database all are lost until their next heartbeat, and none has been replaced. After the end
    of a host all are lost and replaced, but none of them had replaced another. Consumers in plain SQL have no process
    that is known: their connections end without a word.

    ``since``: of each group, one of those lost since this time must have started after the end of another.
    """
    found: dict[str, Death] = {}
    for group in overview.groups:
        rows = [row for row in group.subscribers if not row.is_sql]
        by_others = replaced(rows)
        lost = [row for row in rows if row.name in by_others]
        newest = [row for row in lost if row.heartbeat_at >= since]
        if not newest or max(row.started_at for row in newest) <= min(row.heartbeat_at for row in newest):
            continue
        for row in lost:
            at = max(row.heartbeat_at, found[row.name].at if row.name in found else 0)
            found[row.name] = Death(row.name, at, "", str(row.info.get("host", "")), frozenset())
    return list(found.values())


def problems(session: Session, overview: QueueOverview) -> Iterator[Problem]:
    """Yield messages that were being handled when several processes died, or else that several processes have died."""
    now, window = overview.now, int(overview.window * 1000)
    known = [*read(session, now - FORGET_AFTER_MS), *_lost(overview, now - window)]
    known.sort(key=lambda death: (death.at, death.name))
    deaths = [death for death in known if death.at >= now - window]
    numbers = Counter(one for death in deaths for one in death.handled)
    common = [one for one, number in numbers.most_common(NAMED) if number >= REPEATED]
    suspects = _suspects(session, common)
    explained: set[str] = set()
    for one in common:
        those = [death for death in known if one in death.handled]
        mine = [death for death in those if death.at >= now - window]
        explained |= {death.name for death in those}
        suspect = suspects.get(one, _Suspect("", is_unsettled=False))
        # What has been settled ends no more processes.
        if suspect.is_unsettled or age(now, mine[-1].at) < QUIET:
            yield _of_message(one, suspect, mine, now, _began(those, window))
    others = [death for death in deaths if death.name not in explained]
    if len(others) >= REPEATED:
        yield _of_processes(others, now, _began([one for one in known if one.name not in explained], window))


def _began(deaths: Sequence[Death], window: int) -> int:
    """Return when the first of the deaths was that have followed one another within a window, in milliseconds."""
    began = deaths[-1].at
    for death in reversed(deaths):
        if began - death.at > window:
            break
        began = death.at
    return began


def _of_message(one: Handled, suspect: _Suspect, deaths: list[Death], now: int, began: int) -> Problem:
    ref, offset = one
    text = (
        _(
            "The job %(task)s (message %(offset)s of %(ref)s) was running when %(number)s processes died in the last "
            "%(age)s, the last one with %(how)s."
        )
        if suspect.task
        else _(
            "Message %(offset)s of %(ref)s was being handled when %(number)s processes died in the last %(age)s, the "
            "last one with %(how)s."
        )
    )
    values = {
        "task": suspect.task,
        "offset": offset,
        "ref": ref,
        "number": f"{len(deaths):,}",
        "age": duration(age(now, deaths[0].at)),
        "how": deaths[-1].how,
    }
    return Problem(0, "deaths", text % values, ref, offset=offset, since=began)


def _of_processes(deaths: list[Death], now: int, began: int) -> Problem:
    how = next((death.how for death in reversed(deaths) if death.how), "")
    text = (
        _("%(number)s processes on %(hosts)s died in the last %(age)s, the last one with %(how)s.")
        if how
        else _("%(number)s processes on %(hosts)s were lost in the last %(age)s, and replaced.")
    )
    values = {
        "number": f"{len(deaths):,}",
        "hosts": ", ".join(sorted({death.host for death in deaths})),
        "age": duration(age(now, deaths[0].at)),
        "how": how,
    }
    severity = 0 if age(now, deaths[-1].at) < QUIET else 2
    return Problem(severity, "deaths", text % values, since=began, is_private=True)


def _suspects(session: Session, handled: Iterable[Handled]) -> Mapping[Handled, _Suspect]:
    """Return the task of each message, and whether it is still to be settled."""
    rows = session.joined(
        "SELECT v.g, v.t, v.o, COALESCE(r.task_path, ''), CASE WHEN s.acked = %s THEN 1 ELSE 0 END",
        "gto",
        [(*ref, offset) for ref, offset in handled],
        f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o "
        f"{session.dialect.join_to(STATE, 's', left=True)} ON s.consumer_group = v.g AND s.topic = v.t "
        "AND s.partition_key = m.partition_key AND s.message_offset = v.o "
        f"{session.dialect.join_to(RESULTS, 'r', left=True)} ON r.id = {PUBLISHED_ID}",
        before=[False],
    )
    return {
        (GroupRef(group, topic), offset): _Suspect(task, is_unsettled=bool(unsettled))
        for group, topic, offset, task, unsettled in rows
    }
