"""The record that a subscriber leaves that refuses to start."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Collection, Mapping
from zlib import crc32

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import router

from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.process.lifeline import Incarnation
from django_mysqlqueue.runtime.process.subscriber import full_name
from django_mysqlqueue.service import heartbeats
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import bounded
from django_mysqlqueue.text.humanize import shortened
from django_mysqlqueue.version import __version__

SECONDS = 2.0
"""Seconds to wait for each answer of a database: the process is about to end."""
LENGTH = 1000
"""Maximum number of characters of a reason."""
GROUPS = 500
"""Maximum number of groups that are recorded; with more, the record is like one whose groups are not known."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def record(refs: Mapping[str, Collection[GroupRef]], name: str | None, error: Exception) -> None:
    """Record why a subscriber has refused to start, in each database whose tables can be written.

    A process that is started again and again keeps one record.

    ``refs``: by alias, the groups for which it would have worked; empty if they are not known. ``name``: the value of
    ``--name``.
    """
    for using, groups in (refs or dict.fromkeys(_aliases(), ())).items():
        known = sorted(groups) if len(groups) <= GROUPS else []
        info = {"host": socket.gethostname(), "version": __version__, "refused": _reason(error), "groups": known}
        key = f"{crc32(repr(known).encode()):08x}"
        # The command's error must be seen even if this fails: the database may be the reason.
        with contextlib.suppress(Exception), bounded(using, read=SECONDS, connect=SECONDS), sessions.sound(using):
            heartbeats.refuse(using, full_name(name, Incarnation(0, key)), info)


def _aliases() -> list[str]:
    try:
        return queue_aliases()
    except ImproperlyConfigured:  # a setting is invalid, perhaps that of the database
        given = settings.MYSQLQUEUE.get("DATABASE") if isinstance(settings.MYSQLQUEUE, Mapping) else None
        return [given if isinstance(given, str) else router.db_for_write(ConsumerGroup)]


def _reason(error: Exception) -> str:
    """Return the text of an error in one line."""
    kind = "" if isinstance(error, CommandError) else f"{type(error).__name__}: "
    return shortened(" ".join(_COLOR.sub("", f"{kind}{error}").split()), most=LENGTH)
