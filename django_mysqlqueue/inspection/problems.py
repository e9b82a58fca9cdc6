"""Problems of the queue, as the dashboard and the health check report them.

They are found in an overview, in the rollups and with a few short queries; nothing here walks the log.
"""

from __future__ import annotations

from collections.abc import Mapping

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.inspection import (
    beginnings,
    costs,
    failing_tasks,
    group_problems,
    queue_problems,
    retried_keys,
    subscriber_problems,
)
from django_mysqlqueue.inspection.beginnings import Ended, Failed, Past
from django_mysqlqueue.inspection.bounds import PAGES, STALL_TIMES, Bounds, StallTimes
from django_mysqlqueue.inspection.failing_tasks import FailingTasks
from django_mysqlqueue.inspection.overview import QueueOverview, get_overview
from django_mysqlqueue.inspection.problem import Problem
from django_mysqlqueue.inspection.retried_keys import RetriedKeys
from django_mysqlqueue.options.conf import HealthSettings, get_settings
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.effective import known_handlers


@checked()
def find_problems(
    overview: QueueOverview | None = None,
    *,
    using: str | None = None,
    thresholds: HealthSettings | None = None,
    stall_times: StallTimes = STALL_TIMES,
    bounds: Bounds = PAGES,
) -> list[Problem]:
    """Find the problems of the queue, worst first.

    Args:
        overview: the state to check, read with the window of the thresholds; if None, it is read. With an overview of
            some groups, only their problems and those of the whole queue are found.
        using: alias of the queue's database, if there is no overview (default: ``MYSQLQUEUE["DATABASE"]``, else the
            router's choice).
        thresholds: limits above which failures are a problem (default: the setting ``HEALTH``).
        stall_times: times after which a lack of progress is a problem.
        bounds: limits of what is read.

    Raises:
        InvalidMessage: ``using`` is not an alias in ``DATABASES``.
        ImproperlyConfigured: the setting ``HEALTH`` is invalid.
        django.db.Error: the database refuses or does not answer.
    """
    thresholds = thresholds or get_settings().health
    overview = overview or get_overview(using=using, bounds=bounds, window=thresholds.window)
    session = Session(overview.using)
    found = [
        *queue_problems.outbox(session, overview, stall_times),
        *queue_problems.quarantined(session, overview),
        *queue_problems.long_transactions(session, overview.now, stall_times),
        *queue_problems.slow_database(overview, thresholds.max_round_trip),
    ]
    recent, still = (overview.now - int(seconds * 1000) for seconds in (overview.window, stall_times.still))
    lately: dict[GroupRef, Ended] = {}
    moving: set[GroupRef] = set()
    for bucket in rollups.since(session, rollups.MINUTE, min(recent, still)):
        if bucket.at >= recent:
            lately.setdefault(bucket.ref, Ended()).buckets.append(bucket)
        if bucket.at >= still and (bucket.attempts or bucket.settled):
            moving.add(bucket.ref)
    declared = known_handlers()
    began = beginnings.of_groups(session, overview.groups)
    past = _past(session, overview, lately, thresholds, stall_times)
    by_task = _by_task(session, overview, lately, thresholds, stall_times)
    by_key = _by_key(session, overview, lately, thresholds, stall_times)
    explained = {ref: len(keys.offsets) for ref, keys in by_key.items()} | {
        ref: tasks.jobs for ref, tasks in by_task.items()
    }
    stuck = {
        Failed(group.ref, head.offset): group.sought_at
        for group in overview.groups
        for head in group_problems.stuck_heads(group, overview.now, stall_times)
    }
    failed_first = beginnings.of_messages(session, stuck)
    for group in overview.groups:
        found += group_problems.progress(
            group,
            declared.get(group.ref),
            overview.now,
            stall_times,
            moves=group.ref in moving,
            began=began.get(group.ref, beginnings.NOTHING),
            failed_first=failed_first,
        )
        attempts = group_problems.Attempts(
            lately.get(group.ref, Ended()),
            thresholds,
            overview.window,
            past=past.get(group.ref),
            explained=explained.get(group.ref, 0),
            tasks=by_task.get(group.ref),
        )
        found += group_problems.failures(group, declared.get(group.ref), attempts, stall_times, overview.now)
    # If every attempt of a group fails, keys tell nothing, and that problem names the tasks.
    failing = {one.ref for one in found if one.kind == "failing" and one.ref and not lately[one.ref].acked}
    found += [
        group_problems.retrying(ref, keys, thresholds, overview.now)
        for ref, keys in by_key.items()
        if ref not in failing and ref not in by_task
    ]
    found += [
        group_problems.failing_tasks(ref, tasks, thresholds, overview.now)
        for ref, tasks in by_task.items()
        if ref not in failing
    ]
    found += subscriber_problems.missing_tasks(session, overview, stall_times, bounds=bounds)
    found += subscriber_problems.lost_subscribers(session, overview)
    found += subscriber_problems.deaths(session, overview)
    found += queue_problems.relays(overview, stall_times)
    found += queue_problems.routes(overview)
    if overview.topics is not None:
        found += subscriber_problems.refused(session, overview)
        found += queue_problems.recurring(overview, stall_times)
        found += queue_problems.groupless_topics(session, overview.topics, overview.now, bounds=bounds)
    found = list(costs.added(session, overview, found, declared, by_key))
    return sorted(found, key=lambda one: (one.severity, -one.harm.value, one.kind, one.ref or ("", "")))


def _past(
    session: Session,
    overview: QueueOverview,
    lately: Mapping[GroupRef, Ended],
    thresholds: HealthSettings,
    times: StallTimes,
) -> dict[GroupRef, Past]:
    """Return the earlier attempts of groups that fail now."""
    most = thresholds.max_recent_dead_letters
    wanted = {}
    for group in overview.groups:
        ended = lately.get(group.ref, Ended())
        failures = group_problems.failing(group, ended, thresholds, times, overview.now)
        has_many = most is not None and max(group.recent_dead_letters.value, ended.dead_lettered) > most
        if has_many or failures is not None:
            wanted[group.ref] = ended.failed
    refs = sorted(wanted, key=lambda ref: (-wanted[ref], ref))
    rule = group_problems.rule_of(thresholds)
    return beginnings.of_failures(session, refs, overview.now, rule, most=most, window=overview.window)


def _by_task(
    session: Session,
    overview: QueueOverview,
    lately: Mapping[GroupRef, Ended],
    thresholds: HealthSettings,
    times: StallTimes,
) -> dict[GroupRef, FailingTasks]:
    """Return the tasks, by queue, of which every attempt fails. Only queues are read in which attempts have failed."""
    started = {}
    for group in overview.groups:
        has_failures = lately.get(group.ref, Ended()).failed >= thresholds.min_attempts
        uptime = group.uptime(overview.now)
        if has_failures and uptime >= times.started and is_of_jobs(group.ref):
            started[group.ref] = overview.now - int(uptime * 1000)
    recent = overview.now - int(overview.window * 1000)
    return failing_tasks.find(session, started, least=thresholds.min_attempts, recent=recent)


def _by_key(
    session: Session,
    overview: QueueOverview,
    lately: Mapping[GroupRef, Ended],
    thresholds: HealthSettings,
    times: StallTimes,
) -> dict[GroupRef, RetriedKeys]:
    """Return the keys of groups of which every attempt fails."""
    started = {}
    for group in sorted(overview.groups, key=lambda one: -one.retrying.value):
        is_busy = lately.get(group.ref, Ended()).failed >= thresholds.min_attempts
        number, uptime = group.retrying.value + is_busy * group.in_flight.value, group.uptime(overview.now)
        if number >= retried_keys.LEAST and uptime >= times.started:
            started[group.ref] = overview.now - int(uptime * 1000)
    return retried_keys.find(session, started, least=thresholds.min_attempts)
