"""Problems of the queue, as the dashboard and the health check report them.

They are found in an overview, in the rollups and with a few short queries; nothing here walks the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.conf import HealthSettings, get_settings
from django_mysqlqueue.inspection import beginnings, group_problems, queue_problems, retried_keys
from django_mysqlqueue.inspection.beginnings import Failed
from django_mysqlqueue.inspection.bounds import PAGES, STALL_TIMES, Bounds, StallTimes
from django_mysqlqueue.inspection.group_problems import Ended
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview, get_overview
from django_mysqlqueue.inspection.problem import Problem
from django_mysqlqueue.service import rollups
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
        *queue_problems.long_transactions(session, overview.now, stall_times),
        *queue_problems.slow_database(overview, thresholds.max_round_trip),
    ]
    recent, still = (overview.now - int(seconds * 1000) for seconds in (overview.window, stall_times.still))
    lately: dict[GroupRef, Ended] = {}
    moving: set[GroupRef] = set()
    for bucket in rollups.since(session, rollups.MINUTE, min(recent, still)):
        if bucket.at >= recent:
            lately.setdefault(bucket.ref, Ended()).add(bucket)
        if bucket.at >= still and (
            bucket.acked or bucket.failed or bucket.dead_lettered or any(bucket.passed.values())
        ):
            moving.add(bucket.ref)
    declared = known_handlers()
    began = beginnings.of_groups(session, overview.groups)
    failing = [ref for ref, ended in sorted(lately.items()) if ended.failed and not ended.acked]
    since = beginnings.of_failures(session, failing, overview.now)
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
        ended = lately.get(group.ref, Ended())
        found += group_problems.failures(
            group,
            ended,
            thresholds,
            stall_times,
            overview.now,
            overview.window,
            failing_since=since.get(group.ref),
        )
    # If no attempt succeeds, keys tell nothing.
    succeeding = [group for group in overview.groups if lately.get(group.ref, Ended()).acked]
    found += _retrying(session, succeeding, overview, stall_times)
    found += queue_problems.lost_subscribers(session, overview)
    found += queue_problems.relays(overview, stall_times)
    found += queue_problems.routes(overview)
    if overview.topics is not None:
        found += queue_problems.refused(session, overview)
        found += queue_problems.recurring(overview, stall_times)
        found += queue_problems.groupless_topics(session, overview.topics, overview.now, bounds=bounds)
    return sorted(found, key=lambda problem: (problem.severity, problem.kind, problem.ref or ("", "")))


def _retrying(
    session: Session, groups: Sequence[GroupOverview], overview: QueueOverview, times: StallTimes
) -> Iterator[Problem]:
    """Yield groups of which messages with few keys fail repeatedly."""
    asked = {
        group.ref: group
        for group in groups
        if group.retrying.value >= retried_keys.LEAST and group.uptime(overview.now) >= times.started
    }
    retried = retried_keys.find(session, list(asked))
    first = {Failed(ref, one.offsets[0]): asked[ref].sought_at for ref, one in retried.items()}
    began = beginnings.of_messages(session, first)
    for ref, one in retried.items():
        yield group_problems.retrying(asked[ref], one, began.get(Failed(ref, one.offsets[0])))
