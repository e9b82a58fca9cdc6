"""Backlogs that were not counted to their end: the newest samples know more."""

from __future__ import annotations

from dataclasses import replace

from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import MINUTE, Bucket
from django_mysqlqueue.sql.session import Session

MINUTES = 2
"""Samples of earlier minutes than this number of minutes ago are too old."""


def with_samples(overview: QueueOverview) -> QueueOverview:
    """Return an overview with the newest sample of each group whose count stopped, if the sample is larger.

    If all counts are exact, nothing is read.

    Args:
        overview: the state of the queue.
    """
    stopped = [group.ref for group in overview.groups if not group.lag.exact]
    if not stopped:
        return overview
    since = (overview.now // 60_000 - MINUTES) * 60_000
    found: dict[GroupRef, Bucket] = {}
    for bucket in rollups.of_groups(Session(overview.using), MINUTE, since, stopped, now=overview.now):
        if bucket.backlog is not None:
            found[bucket.ref] = bucket
    return replace(overview, groups=tuple(_group(group, found.get(group.ref)) for group in overview.groups))


def _group(group: GroupOverview, bucket: Bucket | None) -> GroupOverview:
    # A sample of before a seek is that of another position.
    if bucket is None or bucket.backlog is None or bucket.at < group.sought_at:
        return group
    sample = bucket.backlog
    if sample.value <= group.lag.value:
        return group
    return replace(group, lag=Count(sample.value, exact=False, about=sample.exact))
