"""Three consumer groups of one topic; each gets every event, whatever becomes of it in the others.

``manage.py runsubscriber`` finds this module by its name. ``samples.record`` is
for the demo's latencies; an application of your own leaves it out.
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
TOO_LARGE = 100
"""Changed files: a commit above the first gets a review task, one above the second fails."""
REVIEW_ATTEMPTS = 3
BAD_LUCK = 0.01


@subscriber(TOPIC, group="statistics", atomic=True)
def count_commit(delivery: Delivery) -> None:
    """Adds a commit to its day.

    Adding twice would be wrong, and nothing here guards against it: with
    ``atomic=True`` the increments and the ack commit together or not at all.
    """
    samples.record(delivery)
    event = CommitEvent.from_payload(delivery.payload)
    added = _counts(event)
    day = DailyStatistics.objects.filter(repository=event.repository, day=event.day)
    # A repository's events come one after another, so nobody creates the row in between.
    if not day.update(**{name: F(name) + value for name, value in added.items()}):
        DailyStatistics.objects.create(repository=event.repository, day=event.day, **added)


@subscriber(REPLAYED, group="statistics", atomic=True)
def count_replayed_commit(delivery: Delivery) -> None:
    """Adds a commit that came back from the archive to its repository."""
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


# Strict order: should the database fail a start, later events wait for it instead of passing it.
@subscriber(TOPIC, group="order-check", on_failure="block")
def check_order(delivery: Delivery) -> None:
    """Checks that a repository's events arrive in the order in which they were published.

    At least once: the ack is written after the handler has returned, so after a
    crash an event may come again. That is a duplicate, not a violation.
    """
    samples.record(delivery)
    event = CommitEvent.from_payload(delivery.payload)
    order = RepositoryOrder.objects.filter(repository=event.repository)
    # One statement where all is well.
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
    """A commit that nobody can review."""


class BadLuck(Exception):
    """Stands for what fails now and then: a network, a service."""


# Reviews need no order: any process takes any event.
@subscriber(
    TOPIC, group="review", mode="shared", max_attempts=REVIEW_ATTEMPTS, backoff=Backoff(initial=0.05, maximum=1.0)
)
def review(delivery: Delivery) -> None:
    """Makes a task for a large commit; fails for good on the largest, now and then on any.

    What raises is tried again after a backoff; after the last attempt the
    message is in the DLQ, for this group alone.
    """
    samples.record(delivery)
    event = CommitEvent.from_payload(delivery.payload)
    if event.files > TOO_LARGE:
        raise TooLarge(f"{event.files} changed files; at most {TOO_LARGE} can be reviewed")
    # Bad luck ends before the attempts do, so that exactly the outliers are dead letters.
    if delivery.attempt < REVIEW_ATTEMPTS and is_bad_luck(event.sha, delivery.attempt):
        raise BadLuck("by chance")
    if event.files > WORTH_A_REVIEW:
        # Idempotent, since this group too may get an event twice.
        ReviewTask.objects.get_or_create(repository=event.repository, sha=event.sha, defaults={"files": event.files})


def is_bad_luck(sha: str, attempt: int) -> bool:
    """Chance that is the same in every run with the same seed (``manage.py demo --seed``)."""
    seed = os.environ.get("DEMO_SEED", "0")
    digest = hashlib.sha256(f"{seed}:{sha}:{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < BAD_LUCK * 2**64
