"""Handlers of three consumer groups on one topic. Each group receives the events independently of the others.

``manage.py runsubscriber`` finds this module by its name. ``samples.record`` measures latency for the demo; your
own handlers do not need it.
"""

from __future__ import annotations

import hashlib
import os

from django.db.models import F

from django_mysqlqueue import Backoff, Delivery, subscriber
from example_project.commits.demo import samples
from example_project.commits.events import REPLAYED, TOPIC, CommitEvent
from example_project.commits.models import (
    DailyStatistics,
    OrderViolation,
    ReplayedStatistics,
    RepositoryOrder,
    ReviewTask,
)

WORTH_A_REVIEW = 20
"""Only commits that change more files are reviewed."""
TOO_LARGE = 100
"""A commit that changes more files fails at every attempt."""
REVIEW_ATTEMPTS = 3
BAD_LUCK = 0.05
"""The share of attempts that fail at random."""


@subscriber(TOPIC, group="statistics", atomic=True)
def count_commit(delivery: Delivery) -> None:
    """Add a commit to the totals of its day.

    Counting a commit twice would be wrong, and this code does not guard against it. It need not: with ``atomic=True``
    the increments and the ack commit together or not at all.
    """
    samples.record(delivery)
    event = CommitEvent.from_payload(delivery.payload)
    added = _counts(event)
    day = DailyStatistics.objects.filter(repository=event.repository, day=event.day)
    # The events of a repository are handled one at a time, so no other handler creates the row in between.
    if not day.update(**{name: F(name) + value for name, value in added.items()}):
        DailyStatistics.objects.create(repository=event.repository, day=event.day, **added)


@subscriber(REPLAYED, group="statistics", atomic=True)
def count_replayed_commit(delivery: Delivery) -> None:
    """Add a replayed commit to the totals of its repository."""
    event = CommitEvent.from_payload(delivery.payload)
    added = _counts(event)
    repository = ReplayedStatistics.objects.filter(repository=event.repository)
    if not repository.update(**{name: F(name) + value for name, value in added.items()}):
        ReplayedStatistics.objects.create(repository=event.repository, **added)


def _counts(event: CommitEvent) -> dict[str, int]:
    return {
        "commits": 1,
        "merges": int(event.is_merge),
        "files": event.files,
        "insertions": event.insertions,
        "deletions": event.deletions,
    }


# Strict order: if an attempt fails, later events of the repository wait for it instead of overtaking it.
@subscriber(TOPIC, group="order-check", on_failure="block")
def check_order(delivery: Delivery) -> None:
    """Check that the events of a repository arrive in the order in which they were published.

    Delivery is at least once: the ack is written after the handler has returned, so an event may be redelivered
    after a crash. That is a duplicate, not a violation of the order.
    """
    samples.record(delivery)
    event = CommitEvent.from_payload(delivery.payload)
    order = RepositoryOrder.objects.filter(repository=event.repository)
    # The usual case takes one statement.
    if order.filter(last_sequence=event.sequence - 1).update(last_sequence=event.sequence):
        return
    known, _ = RepositoryOrder.objects.get_or_create(repository=event.repository, defaults={"last_sequence": 0})
    if event.sequence <= known.last_sequence:
        order.update(duplicates=F("duplicates") + 1)
        return
    if event.sequence != known.last_sequence + 1:
        OrderViolation.objects.create(
            repository=event.repository,
            expected=known.last_sequence + 1,
            received=event.sequence,
            offset=delivery.offset,
        )
    order.update(last_sequence=event.sequence)


class TooLarge(Exception):
    """Raised for a commit that is too large to review."""


class BadLuck(Exception):
    """Stands in for a temporary failure, for example of a network or a service."""


# Reviews need no order, so any subscriber may take any event. The filter passes small commits without a call. At most
# two commits of a repository are reviewed at a time, by all subscribers together.
@subscriber(
    TOPIC,
    group="review",
    mode="shared",
    filter={"files": [{"numeric": [">", WORTH_A_REVIEW]}]},
    max_in_flight_per_key=2,
    max_attempts=REVIEW_ATTEMPTS,
    backoff=Backoff(initial=0.05, maximum=1.0),
)
def review(delivery: Delivery) -> None:
    """Create a review task for a large commit. Fail always for the largest commits and at random for the others.

    A failed message is redelivered after a backoff. After the last attempt it is moved to the DLQ, for this group
    only.
    """
    samples.record(delivery)
    event = CommitEvent.from_payload(delivery.payload)
    if event.files > TOO_LARGE:
        raise TooLarge(f"the commit changes {event.files} files; a review is limited to {TOO_LARGE}")
    # The last attempt never fails at random, so exactly the commits that are too large become dead letters.
    if delivery.attempt < REVIEW_ATTEMPTS and is_bad_luck(event.sha, delivery.attempt):
        raise BadLuck("random failure")
    # Idempotent, because this group may receive an event twice.
    ReviewTask.objects.get_or_create(repository=event.repository, sha=event.sha, defaults={"files": event.files})


def is_bad_luck(sha: str, attempt: int) -> bool:
    """Return whether an attempt fails at random: the same in every run with the same ``manage.py demo --seed``."""
    seed = os.environ.get("DEMO_SEED", "0")
    digest = hashlib.sha256(f"{seed}:{sha}:{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < BAD_LUCK * 2**64
