"""The topics that are queues of jobs: those that ``TASKS`` names."""

from __future__ import annotations

from collections.abc import Callable, Collection

from django_mysqlqueue.limits import JOB_PREFIX

find: Callable[[], Collection[str]] | None = None
"""Returns the topics; set by the app if there is a framework for tasks."""


def topics() -> Collection[str]:
    """Return the topics of all queues of jobs; none if there is no framework for tasks."""
    return () if find is None else find()


def is_queue(topic: str) -> bool:
    """Return whether a topic is a queue of jobs. A project may have other topics whose names begin in the same way."""
    return topic.startswith(JOB_PREFIX) and topic in topics()
