"""Problems of subscribers that are lost, have refused to start, cannot run tasks, or have died."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue.db.tables import HEARTBEATS, LEASES, LOG, RESULTS, STATE
from django_mysqlqueue.inspection.bounds import PAGES, Bounds, StallTimes
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.inspection.problem import NOTE, Problem, age
from django_mysqlqueue.inspection.subscribers import Refusal, SubscriberStatus, read_refusals, replaced
from django_mysqlqueue.names.rules import JOB_PREFIX, KEY_LENGTH
from django_mysqlqueue.service import job_rows
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.heartbeats import FORGET_AFTER_MS
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, among, grouped
from django_mysqlqueue.text.humanize import duration, moment

RESTARTED = 600.0
"""Seconds within which a process manager repeats a start that was refused: twice the longest pause of Kubernetes."""
NAMES = 100
"""Maximum number of lost subscribers, replaced ones and those of idle groups, whose leases are read."""


def lost_subscribers(session: Session, overview: QueueOverview) -> Iterator[Problem]:
    """Yield lost subscribers with leases, and those of groups with a backlog that nobody has replaced."""
    missed: dict[tuple[str, GroupRef], SubscriberStatus] = {}
    others: dict[tuple[str, GroupRef], SubscriberStatus] = {}
    for group in overview.groups:
        by_others = replaced(group.subscribers)
        # Messages that it has claimed are unsettled, and so part of the backlog.
        is_behind = bool(group.lag) or not group.lag.exact
        for row in group.subscribers:
            if not row.live:
                is_missed = is_behind and row.name not in by_others
                (missed if is_missed else others)[row.name, group.ref] = row
    owners = _with_leases(session, sorted({name for name, _ in others})[:NAMES])
    for (name, ref), row in sorted((missed | {key: others[key] for key in owners & others.keys()}).items()):
        text = _("Subscriber %(name)s of %(ref)s is lost: no heartbeat for %(age)s.")
        values = {"name": name, "ref": ref, "age": duration(age(overview.now, row.heartbeat_at))}
        yield Problem(2, "silent", text % values, ref, subscriber=name, since=row.heartbeat_at, is_private=True)


def refused(session: Session, overview: QueueOverview) -> Iterator[Problem]:
    """Yield subscribers that have refused to start. Those with the same reason are one problem."""
    by_reason = grouped(((one.version, one.reason), one) for one in read_refusals(session))
    for (version, reason), alike in by_reason.items():
        text = ngettext(
            "A subscriber of release %(version)s refused to start, on host %(host)s %(age)s ago: %(reason)s",
            "%(number)s subscribers of release %(version)s refused to start, the last on host %(host)s %(age)s ago: "
            "%(reason)s",
            len(alike),
        )
        values = {
            "number": f"{len(alike):,}",
            "version": version,
            "host": alike[0].host,
            "age": duration(age(overview.now, alike[0].at)),
            "reason": reason if reason.endswith(".") else f"{reason}.",
        }
        yield Problem(
            min(_missed(one, overview) for one in alike),
            "refused",
            text % values,
            subscriber=alike[0].name,
            since=alike[-1].at,
            is_private=True,
        )


def _missed(one: Refusal, overview: QueueOverview) -> int:
    """Return how severe it is that a subscriber has refused to start: if others work for its groups, nothing waits."""
    # For groups that are not registered yet, nothing waits; those beyond the limits of the overview are not known.
    registered = [group for group in overview.groups if group.ref in one.refs]
    if not all(group.live for group in registered) or not overview.live:
        return 0
    # What nothing starts again, such as a command with a mistyped option, is over.
    return NOTE if not one.refs and age(overview.now, one.at) >= RESTARTED else 1


def _with_leases(session: Session, names: Sequence[str]) -> set[tuple[str, GroupRef]]:
    """Return the subscribers that own partitions, with the groups of these partitions."""
    if not names:
        return set()
    rows = session.rows(
        f"SELECT DISTINCT leased_by, consumer_group, topic FROM {LEASES}"
        f"{session.dialect.force_index('queue_leases_owner')} WHERE {among('leased_by', names)}",
        names,
    )
    return {(name, GroupRef(group, topic)) for name, group, topic in rows}


# -- tasks that subscribers lack -----------------------------------------------


class NewestJobs(NamedTuple):
    """The newest jobs of a task in a queue: those that are due and have not ended, and who has run others."""

    waiting: Count
    ran_by: frozenset[str]


def missing_tasks(
    session: Session, overview: QueueOverview, times: StallTimes, *, bounds: Bounds = PAGES
) -> Iterator[Problem]:
    """Yield tasks that live subscribers have said they cannot run, while jobs of them wait."""
    for group in overview.groups:
        lacking = sorted({path for row in group.live for path in row.unknown})
        for path in lacking:
            queue = group.ref.topic.removeprefix(JOB_PREFIX)
            jobs = newest_jobs(session, path, queue, overview.now, most=bounds.jobs // len(lacking))
            if jobs.waiting:
                yield _missing_task(group, path, jobs, overview.now, times)


def newest_jobs(session: Session, path: str, queue: str, now: int, *, most: int) -> NewestJobs:
    """Return the newest jobs of a task that are in a queue, along the index of tasks, of which ``most`` are read."""
    rows = session.rows(
        f"SELECT queue_name, status, run_after, {session.dialect.ending('worker_ids', KEY_LENGTH + 1)} "
        f"FROM {RESULTS}{session.dialect.force_index('queue_job_results_task')} "
        "WHERE task_path = %s ORDER BY enqueued_at DESC, id DESC LIMIT %s",
        (path, most),
    )
    of_queue = [row[1:] for row in rows if row[0] == queue]
    waiting = sum(status in (job_rows.READY, job_rows.RUNNING) and due <= now for status, due, _ in of_queue)
    ran_by = {
        workers.strip("\n").rsplit("\n", 1)[-1] for status, _, workers in of_queue if status == job_rows.SUCCESSFUL
    }
    return NewestJobs(Count(waiting, exact=len(rows) < most), frozenset(ran_by))


def _missing_task(group: GroupOverview, path: str, jobs: NewestJobs, now: int, times: StallTimes) -> Problem:
    lacking = {row.name: row.unknown[path] for row in group.live if path in row.unknown}
    first = min(lacking.values(), key=lambda unknown: unknown.since)
    live = {row.name for row in group.live}
    has_run = live & jobs.ran_by - {*lacking}
    text = ngettext(
        "%(number)s job of the task %(task)s waits: since %(since)s, %(some)s of %(all)s live subscribers of %(ref)s "
        "cannot run it.",
        "%(number)s jobs of the task %(task)s wait: since %(since)s, %(some)s of %(all)s live subscribers of %(ref)s "
        "cannot run it.",
        jobs.waiting.value,
    )
    if has_run:
        others = _("Others have run it: %(name)s.")
    elif len(lacking) < len(live):
        others = _("Whether the others can is not known.")
    else:
        others = _("None of them can.")
    values = {
        "number": str(jobs.waiting),
        "task": path,
        "since": moment(first.since),
        "some": f"{len(lacking):,}",
        "all": f"{len(live):,}",
        "ref": group.ref,
        "name": min(has_run, default=""),
    }
    return Problem(
        1 if has_run or age(now, first.since) < times.missing else 0,
        "missing_task",
        f"{text} {others}" % values,
        group.ref,
        since=first.since,
        messages=jobs.waiting,
        error=first.error,
        is_private=bool(has_run),
    )


# -- processes that have died --------------------------------------------------

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


def _recorded(session: Session, since: int) -> list[Death]:
    """Return the deaths since a time, as processes that were started in their places have recorded them."""
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
    return list(found.values())


def _lost(overview: QueueOverview, since: int) -> list[Death]:
    """Return the lost subscribers that others have replaced: somebody else than a supervisor restarts their processes.

    After an outage of the database all are lost until their next heartbeat, and none has been replaced. After the end
    of a host all are lost and replaced, but none of them had replaced another: of each group, one of those lost since a
    time must have started after the end of another. Consumers in plain SQL have no process that is known.
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


def deaths(session: Session, overview: QueueOverview) -> Iterator[Problem]:
    """Yield messages that were being handled when several processes died, or else that several processes have died."""
    now, window = overview.now, int(overview.window * 1000)
    every = (*_recorded(session, now - FORGET_AFTER_MS), *_lost(overview, now - window))
    known = sorted(every, key=lambda death: (death.at, death.name))
    recent = [death for death in known if death.at >= now - window]
    numbers = Counter(message for death in recent for message in death.handled)
    common = [message for message, number in numbers.most_common(NAMED) if number >= REPEATED]
    suspects = _suspects(session, common)
    explained: set[str] = set()
    for message in common:
        those = [death for death in known if message in death.handled]
        mine = [death for death in those if death.at >= now - window]
        explained |= {death.name for death in those}
        task, is_unsettled = suspects.get(message, ("", False))
        # What has been settled ends no more processes.
        if is_unsettled or age(now, mine[-1].at) < QUIET:
            yield _of_message(message, task, mine, now, _began(those, window))
    others = [death for death in recent if death.name not in explained]
    if len(others) >= REPEATED:
        yield _of_processes(others, now, _began([death for death in known if death.name not in explained], window))


def _began(deaths: Sequence[Death], window: int) -> int:
    """Return when the first of the deaths was that have followed one another within a window, in milliseconds."""
    began = deaths[-1].at
    for death in reversed(deaths):
        if began - death.at > window:
            break
        began = death.at
    return began


def _of_message(message: Handled, task: str, deaths: list[Death], now: int, began: int) -> Problem:
    ref, offset = message
    text = (
        _(
            "The job %(task)s (message %(offset)s of %(ref)s) was running when %(number)s processes died in the last "
            "%(age)s, the last one with %(how)s."
        )
        if task
        else _(
            "Message %(offset)s of %(ref)s was being handled when %(number)s processes died in the last %(age)s, the "
            "last one with %(how)s."
        )
    )
    number, since = f"{len(deaths):,}", duration(age(now, deaths[0].at))
    text %= {"task": task, "offset": offset, "ref": ref, "number": number, "age": since, "how": deaths[-1].how}
    return Problem(0, "deaths", text, ref, offset=offset, since=began)


def _of_processes(deaths: list[Death], now: int, began: int) -> Problem:
    how = next((death.how for death in reversed(deaths) if death.how), "")
    text = (
        _("%(number)s processes on %(hosts)s died in the last %(age)s, the last one with %(how)s.")
        if how
        else _("%(number)s processes on %(hosts)s were lost in the last %(age)s, and replaced.")
    )
    hosts, since = ", ".join(sorted({death.host for death in deaths})), duration(age(now, deaths[0].at))
    text %= {"number": f"{len(deaths):,}", "hosts": hosts, "age": since, "how": how}
    return Problem(0 if age(now, deaths[-1].at) < QUIET else 2, "deaths", text, since=began, is_private=True)


def _suspects(session: Session, handled: Iterable[Handled]) -> dict[Handled, tuple[str, bool]]:
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
    return {(GroupRef(group, topic), offset): (task, bool(unsettled)) for group, topic, offset, task, unsettled in rows}
