"""Problems of the queue, as the dashboard and the health check report them.

They are found in an overview, in the rollups and with a few short queries; nothing here walks the log.
"""

from __future__ import annotations

from collections import defaultdict

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.inspection import (
    always_failing,
    beginnings,
    costs,
    group_problems,
    queue_problems,
    subscriber_problems,
    topics,
)
from django_mysqlqueue.inspection.beginnings import MINUTE_MS, Ended, Failed, Past
from django_mysqlqueue.inspection.bounds import PAGES, STALL_TIMES, Bounds, StallTimes
from django_mysqlqueue.inspection.overview import QueueOverview, get_overview
from django_mysqlqueue.inspection.problem import STATES, Problem
from django_mysqlqueue.inspection.trends import rates_begin
from django_mysqlqueue.options.conf import HealthSettings, get_settings
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import Bucket
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
        using: alias of the database, if there is no overview (default: that of the queue).
        thresholds: limits above which failures are a problem (default: the setting ``HEALTH``).
        stall_times: times after which a lack of progress is a problem.
        bounds: limits of what is read.

    Raises:
        ImproperlyConfigured: the setting ``HEALTH`` is invalid.
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
    now, least = overview.now, thresholds.min_attempts
    recent, still = (now - int(seconds * 1000) for seconds in (overview.window, stall_times.still))
    lately: defaultdict[GroupRef, Ended] = defaultdict(Ended)
    moving: set[GroupRef] = set()
    newest: defaultdict[GroupRef, list[Bucket]] = defaultdict(list)
    begin = rates_begin(now)
    for bucket in rollups.since(session, rollups.MINUTE, min(recent, still, begin)):
        if bucket.at >= recent:
            lately[bucket.ref].buckets.append(bucket)
        if bucket.at >= begin:
            newest[bucket.ref].append(bucket)
        if bucket.at >= still and (bucket.attempts or bucket.settled):
            moving.add(bucket.ref)
    declared = known_handlers()
    began = beginnings.of_groups(session, overview.groups)
    past = _past(session, overview, lately, thresholds, stall_times)
    uptimes = {group.ref: group.uptime(now) for group in overview.groups}
    started = {ref: now - int(uptime * 1000) for ref, uptime in uptimes.items() if uptime >= stall_times.started}
    often = {ref for ref, ended in lately.items() if ended.failed >= least}
    of_jobs = {ref: at for ref, at in started.items() if ref in often and is_of_jobs(ref)}
    by_task = always_failing.find_tasks(session, of_jobs, least=least, recent=recent)
    unsettled = {
        group.ref: group.retrying.value + (group.ref in often) * group.in_flight.value
        for group in sorted(overview.groups, key=lambda one: -one.retrying.value)
        if group.ref in started
    }
    several = {ref: started[ref] for ref, number in unsettled.items() if number >= always_failing.LEAST}
    acked = {one.ref: one.at + MINUTE_MS for ended in lately.values() for one in ended.buckets if one.acked}
    by_key = always_failing.find_keys(session, several, least=least, recent=recent, acked=acked)
    explained = by_key | by_task
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
            lately[group.ref],
            thresholds,
            overview.window,
            past=past.get(group.ref),
            explained=explained[group.ref].recent if group.ref in explained else 0,
            tasks=by_task.get(group.ref),
        )
        found += group_problems.failures(group, declared.get(group.ref), attempts, stall_times, overview.now)
    # If every attempt of a group fails, keys tell nothing, and that problem names the tasks.
    failing = {one.ref for one in found if one.kind == "failing" and one.ref and not lately[one.ref].acked}
    found += [
        group_problems.retrying(ref, one, thresholds, now) for ref, one in explained.items() if ref not in failing
    ]
    slowed = {one.ref for one in found if one.kind in STATES}
    is_slow = any(one.kind == "slow_database" for one in found)
    for group in overview.groups:
        if group.ref not in slowed and not is_slow:
            found += group_problems.speed(group, newest[group.ref], now)
    found += subscriber_problems.missing_tasks(session, overview, stall_times, bounds=bounds)
    found += subscriber_problems.lost_subscribers(session, overview)
    found += subscriber_problems.deaths(session, overview)
    found += queue_problems.relays(overview, stall_times)
    found += queue_problems.routes(overview)
    if overview.topics is not None:
        found += subscriber_problems.refused(session, overview)
        found += queue_problems.recurring(overview, stall_times)
        found += queue_problems.readers(overview, stall_times)
        found += topics.disk(session, overview, thresholds.max_log_size)
        found += queue_problems.groupless_topics(session, overview.topics, overview.now, bounds=bounds)
    found = list(costs.added(session, overview, found, declared, by_key))
    return sorted(found, key=lambda one: (one.severity, -one.harm.value, one.kind, one.ref or ("", "")))


def _past(
    session: Session,
    overview: QueueOverview,
    lately: defaultdict[GroupRef, Ended],
    thresholds: HealthSettings,
    times: StallTimes,
) -> dict[GroupRef, Past]:
    """Return the earlier attempts of groups that fail now."""
    most = thresholds.max_recent_dead_letters
    wanted = {}
    for group in overview.groups:
        ended = lately[group.ref]
        failures = group_problems.failing(group, ended, thresholds, times, overview.now)
        has_many = most is not None and max(group.recent_dead_letters.value, ended.dead_lettered) > most
        if has_many or failures is not None:
            wanted[group.ref] = ended.failed
    refs = sorted(wanted, key=lambda ref: (-wanted[ref], ref))
    rule = group_problems.rule_of(thresholds)
    return beginnings.of_failures(session, refs, overview.now, rule, most=most, window=overview.window)
