"""Backlogs that were not counted to their end: the newest samples may know more."""

from __future__ import annotations

from dataclasses import replace

from django_mysqlqueue.inspection.history import look_of
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import MINUTE, Bucket
from django_mysqlqueue.sql.session import Session

MINUTES = 2
"""Samples of earlier minutes than this number of minutes ago are too old."""


def with_samples(overview: QueueOverview) -> QueueOverview:
    """Return an overview with the newest sample of each group whose count stopped, and the sample's age.

    A sample that stopped, too, says nothing: a bound of a while ago is none of now. If all counts are exact, nothing is
    read.
    """
    stopped = [group.ref for group in overview.groups if not group.lag.exact]
    if not stopped:
        return overview
    since = (overview.now // 60_000 - MINUTES) * 60_000
    found: dict[GroupRef, Bucket] = {}
    for bucket in rollups.of_groups(Session(overview.using), MINUTE, since, stopped, now=overview.now):
        if bucket.backlog is not None:
            found[bucket.ref] = bucket
    groups = tuple(_group(group, found.get(group.ref), overview.now) for group in overview.groups)
    return replace(overview, groups=groups)


def _group(group: GroupOverview, bucket: Bucket | None, now: int) -> GroupOverview:
    look = None if bucket is None else look_of(bucket, group.placed_at)
    if look is None or not look.backlog.exact or look.backlog.value <= group.lag.value:
        return group
    age = max(1.0, (now - look.at) / 1000)
    return replace(group, lag=Count(look.backlog.value, exact=False, age=age, least=group.lag.value))
