"""The state of one group, and the backlogs of its partitions, as pages read them."""

from __future__ import annotations

from typing import Any

from django_mysqlqueue.inspection import PAGES, Bounds, GroupOverview, get_overview, partitions
from django_mysqlqueue.inspection.partitions import PartitionBacklogs
from tests.support.harness import USING
from tests.support.internals import Session


def group_of(group: str, topic: str, **options: Any) -> GroupOverview | None:
    return next(iter(get_overview(group=group, topic=topic, **options).groups), None)


def groups_of(topic: str | None = None, **options: Any) -> tuple[GroupOverview, ...]:
    return get_overview(topic=topic, **options).groups


def backlogs_of(
    group: str, topic: str, *, using: str = USING, bounds: Bounds = PAGES, **options: Any
) -> PartitionBacklogs | None:
    session = Session(using)
    found = partitions.listed_groups(session, group=group, topic=topic)
    return partitions.survey(session, found[0], bounds=bounds, **options) if found else None
