"""Operations on the queue, as a Python API: the management commands and the admin call it.

Each function returns a ``Result``; with ``dry_run``, it changes nothing and the result says what would be changed. It
records ``actor`` and ``reason`` in the audit log, and commits independently of a transaction that the caller has open.
"""

from __future__ import annotations

from django_mysqlqueue.operations.celery_beat import import_celery_beat
from django_mysqlqueue.operations.dead_lettering import dead_letter
from django_mysqlqueue.operations.dropping import drop_group
from django_mysqlqueue.operations.erasing import erase
from django_mysqlqueue.operations.group_mode import set_group_mode
from django_mysqlqueue.operations.group_settings import settings
from django_mysqlqueue.operations.moving import cancel_move, move_topic, prepare_move
from django_mysqlqueue.operations.pausing import pause, resume
from django_mysqlqueue.operations.publishing import publish
from django_mysqlqueue.operations.quarantine import delete_quarantined, requeue_quarantined
from django_mysqlqueue.operations.readers import drop_reader
from django_mysqlqueue.operations.recurring import (
    create_recurring,
    delete_recurring,
    pause_recurring,
    resume_recurring,
    run_recurring,
    update_recurring,
)
from django_mysqlqueue.operations.redriving import discard, edit, redrive
from django_mysqlqueue.operations.replaying import replay
from django_mysqlqueue.operations.results import (
    DropResult,
    EditResult,
    ImportResult,
    PublishResult,
    ReplayResult,
    Result,
    ScheduledResult,
    SeekResult,
)
from django_mysqlqueue.operations.retrying import retry
from django_mysqlqueue.operations.scheduled import cancel, reschedule
from django_mysqlqueue.operations.seeking import seek
from django_mysqlqueue.operations.subscribers import forget, release
from django_mysqlqueue.service.audit import ACTIONS as ACTIONS  # All are declared now.

__all__ = [
    "DropResult",
    "EditResult",
    "ImportResult",
    "PublishResult",
    "ReplayResult",
    "Result",
    "ScheduledResult",
    "SeekResult",
    "cancel",
    "cancel_move",
    "create_recurring",
    "dead_letter",
    "delete_quarantined",
    "delete_recurring",
    "discard",
    "drop_group",
    "drop_reader",
    "edit",
    "erase",
    "forget",
    "import_celery_beat",
    "move_topic",
    "pause",
    "pause_recurring",
    "prepare_move",
    "publish",
    "redrive",
    "release",
    "replay",
    "requeue_quarantined",
    "reschedule",
    "resume",
    "resume_recurring",
    "retry",
    "run_recurring",
    "seek",
    "set_group_mode",
    "settings",
    "update_recurring",
]
