"""Where the jobs of recurring schedules go."""

from __future__ import annotations

from django_mysqlqueue.db.sizes import JOB_PATH_LENGTH
from django_mysqlqueue.schedules.registry import OtherBackend, Place
from django_mysqlqueue.tasks.backend import by_alias
from django_mysqlqueue.tasks.framework import InvalidTask
from django_mysqlqueue.tasks.importing import find_task, require_importable


def place_of(path: str, given: Place | None) -> Place:
    """Return where the jobs of a task go.

    ``given``: the place of the task object that was declared; None: that of the task with the path.

    Raises:
        ImportError: there is nothing with this path.
        ValueError: it is not a task, or its backend cannot run it.
        OtherBackend: its backend is not the queue's.
    """
    try:
        task = find_task(path)
        require_importable(task)
    except InvalidTask as error:
        raise ValueError(str(error)) from None
    place = Place(task.backend, task.queue_name, task.priority) if given is None else given
    backend = by_alias().get(place.backend)
    if backend is None:
        raise OtherBackend(f"the backend {place.backend!r} of the task {path} in TASKS is not MySQLQueueBackend.")
    if place.queue_name not in backend.queues:
        raise ValueError(f"the backend {place.backend!r} has no queue {place.queue_name!r} for the task {path}")
    if len(path) > JOB_PATH_LENGTH:
        raise ValueError(f"task {path!r}: the path may have at most {JOB_PATH_LENGTH} characters")
    return place
