"""Store commits and publish their events in one transaction."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction

from django_mysqlqueue import Message, publish_many
from example_project.commits.events import TOPIC, CommitEvent
from example_project.commits.models import Commit


def store(events: Sequence[CommitEvent]) -> None:
    """Store the application's rows and publish the events in one transaction.

    The key keeps the events of a repository in order. The message id makes it safe to publish an event again: the
    duplicate is dropped as long as the first message is in the log.
    """
    with transaction.atomic():
        Commit.objects.bulk_create(
            [
                Commit(
                    repository=event.repository,
                    sha=event.sha,
                    committed_at=event.moment,
                    parents=event.parents,
                    files=event.files,
                    insertions=event.insertions,
                    deletions=event.deletions,
                )
                for event in events
            ]
        )
        publish_many(
            TOPIC,
            (Message(event.payload, key=event.repository, id=event.sha, metadata=event.metadata) for event in events),
        )
