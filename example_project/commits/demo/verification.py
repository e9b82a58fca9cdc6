"""Compares the application's tables and the queue with the input file."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db.models import Count, Max, Min, QuerySet, Sum

from django_mysqlqueue.models import JobResult, QueueMessage, Rollup
from example_project.commits.demo.cleaning import DLQ, queue_status
from example_project.commits.demo.samples import SampleReader
from example_project.commits.events import TOPIC, CommitEvent
from example_project.commits.models import (
    Commit,
    DailyStatistics,
    OrderViolation,
    RepositoryOrder,
    RepositorySummary,
    ReviewTask,
)
from example_project.commits.subscribers import REVIEW_ATTEMPTS, TOO_LARGE, WORTH_A_REVIEW
from example_project.commits.tasks import LONGEST, count_reviews

SHOWN = 5
"""Maximum number of differences of one kind that are listed. The others are only counted."""

Day = tuple[str, datetime.date]
Sums = tuple[int, int, int, int, int]
"""Commits, merges, files, insertions, deletions."""
Sha = tuple[str, str]
"""Repository and SHA."""

K = TypeVar("K")


@dataclass(slots=True)
class Expected:
    """The expected contents of the tables, computed from the input file."""

    commits: Counter[str] = field(default_factory=Counter)
    statistics: dict[Day, Sums] = field(default_factory=dict)
    review_tasks: set[Sha] = field(default_factory=set)
    outliers: set[Sha] = field(default_factory=set)

    @classmethod
    def of(cls, events: Iterable[CommitEvent]) -> Expected:
        expected = cls()
        for event in events:
            expected.commits[event.repository] += 1
            day = event.repository, event.day
            commits, merges, files, insertions, deletions = expected.statistics.get(day, (0, 0, 0, 0, 0))
            expected.statistics[day] = (
                commits + 1,
                merges + event.is_merge,
                files + event.files,
                insertions + event.insertions,
                deletions + event.deletions,
            )
            if event.files > TOO_LARGE:
                expected.outliers.add((event.repository, event.sha))
            elif event.files > WORTH_A_REVIEW:
                expected.review_tasks.add((event.repository, event.sha))
        return expected

    @property
    def total(self) -> int:
        return self.commits.total()

    @property
    def handled(self) -> dict[str, int]:
        """The number of events that each group handles."""
        return {
            "statistics": self.total,
            "order-check": self.total,
            "review": len(self.review_tasks) + len(self.outliers),
        }


def problems(expected: Expected, samples: SampleReader, ranking: Any) -> Iterator[str]:
    """Yield a line for each event that was lost, counted twice or out of order, and for each wrong row or result."""
    yield from _commits(expected)
    yield from _statistics(expected)
    yield from _order(expected)
    yield from _reviews(expected)
    yield from _dead_letters(expected)
    yield from _queue(expected)
    yield from _jobs(expected, ranking)
    for group, found in samples.groups.items():
        if len(found.first) != expected.handled[group]:
            yield f"{group}: handled {len(found.first)} of {expected.handled[group]} events"


def _commits(expected: Expected) -> Iterator[str]:
    stored = Counter(Commit.objects.values_list("repository", flat=True).iterator())
    yield from _differences("number of commits in", expected.commits, stored)


def _statistics(expected: Expected) -> Iterator[str]:
    columns = ("repository", "day", "commits", "merges", "files", "insertions", "deletions")
    stored: dict[Day, Sums] = {
        (repository, day): tuple(sums)
        for repository, day, *sums in DailyStatistics.objects.values_list(*columns).iterator()
    }
    yield from _differences("(commits, merges, files, insertions, deletions) of", expected.statistics, stored)


def _order(expected: Expected) -> Iterator[str]:
    stored = dict(RepositoryOrder.objects.values_list("repository", "last_sequence"))
    yield from _differences("order-check: last event in", expected.commits, stored)
    violations = OrderViolation.objects.order_by("id")
    yield from _shortened([f"order-check: events out of order in {violation}" for violation in violations])


def _reviews(expected: Expected) -> Iterator[str]:
    stored = Counter(ReviewTask.objects.values_list("repository", "sha"))
    yield from _differences("review: number of tasks for", dict.fromkeys(expected.review_tasks, 1), stored)


def _dead_letters(expected: Expected) -> Iterator[str]:
    columns = ("failed_group", "partition_key", "original_id", "failure_count")
    stored = Counter(QueueMessage.objects.filter(topic=DLQ).values_list(*columns))
    wanted = {("review", *outlier, REVIEW_ATTEMPTS): 1 for outlier in expected.outliers}
    yield from _differences("number of dead letters with group, key, message id, failures =", wanted, stored)


def _queue(expected: Expected) -> Iterator[str]:
    status = queue_status()
    for topic in status["topics"]:
        if topic["waiting"] or topic["scheduled"]:
            yield f"the outbox still contains {topic['waiting'] + topic['scheduled']} messages of {topic['topic']}"
        if topic["topic"] == TOPIC and topic["in_log"] != expected.total:
            yield f"the log contains {topic['in_log']} of {expected.total} events"
    for group in status["groups"]:
        for what in ("lag", "in_flight", "retrying"):
            if group[what]:
                yield f"{group['group']}: {what} is {group[what]} at the end, expected 0"


def _jobs(expected: Expected, ranking: Any) -> Iterator[str]:
    stored = dict(RepositorySummary.objects.values_list("repository", "commits"))
    yield from _differences("summaries: number of commits in", expected.commits, stored)
    ranking.refresh()
    if not ranking.is_finished or ranking.errors:
        yield f"the ranking is {ranking.status}: {[error.exception_class_path for error in ranking.errors]}"
        return
    wanted = sorted(expected.commits.items(), key=lambda item: (-item[1], item[0]))[:LONGEST]
    if ranking.return_value != [list(row) for row in wanted]:
        yield f"the ranking is {ranking.return_value}, expected {wanted}"
    unfinished = counts().exclude(status="SUCCESSFUL").count()
    if unfinished:
        yield f"{unfinished} of the recurring counts are not SUCCESSFUL"


def counts() -> QuerySet[JobResult]:
    """Return the results of the recurring job."""
    return JobResult.objects.filter(task_path=count_reviews.module_path)


def job_times() -> tuple[int, int, int]:
    """Return the number of jobs of the chain, when the first one started and when the last one ended.

    The times are in epoch milliseconds.
    """
    of_chain = JobResult.objects.exclude(stage="")
    found = of_chain.aggregate(jobs=Count("pk"), start=Min("started_at"), end=Max("finished_at"))
    return found["jobs"], found["start"] or 0, found["end"] or 0


def _differences(what: str, wanted: Mapping[K, object], stored: Mapping[K, object]) -> Iterator[str]:
    found = []
    for key in sorted({*wanted, *stored}, key=str):
        if wanted.get(key) != stored.get(key):
            name = ", ".join(map(str, key)) if isinstance(key, tuple) else key
            found.append(f"{what} {name}: {stored.get(key, 'none')}, expected {wanted.get(key, 'none')}")
    yield from _shortened(found)


def _shortened(lines: list[str]) -> Iterator[str]:
    yield from lines[:SHOWN]
    if len(lines) > SHOWN:
        yield f"… and {len(lines) - SHOWN} more"


def filtered() -> int:
    """Return the number of events that the filter of the group ``review`` has passed."""
    return int(Rollup.objects.filter(topic=TOPIC, grain=60).aggregate(total=Sum("filtered"))["total"] or 0)


def duplicates() -> int:
    """Return the number of duplicates that the group ``order-check`` has received."""
    return int(RepositoryOrder.objects.aggregate(total=Sum("duplicates"))["total"] or 0)
