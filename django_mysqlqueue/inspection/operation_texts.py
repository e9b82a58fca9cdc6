"""Texts about the operations of the audit log, for the dashboard and for ``queueoperations``."""

from __future__ import annotations

import datetime
import re

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_mysqlqueue import naming
from django_mysqlqueue.humanize import duration, moment
from django_mysqlqueue.inspection.operations_log import OperationEntry
from django_mysqlqueue.redaction import redacted

ACTIONS = {
    "allowed_users": gettext_lazy("Register allowed users"),
    "cancel": gettext_lazy("Cancel scheduled messages"),
    "cancel jobs": gettext_lazy("Cancel jobs"),
    "dead_letter": gettext_lazy("Dead-letter"),
    "delete quarantined": gettext_lazy("Delete quarantined messages"),
    "delete recurring": gettext_lazy("Delete recurring schedule"),
    "deliver now": gettext_lazy("Deliver scheduled messages now"),
    "discard": gettext_lazy("Discard dead letters"),
    "drop": gettext_lazy("Drop group"),
    "filter": gettext_lazy("Register filter"),
    "forget": gettext_lazy("Forget subscriber"),
    "limits": gettext_lazy("Register limits"),
    "mode": gettext_lazy("Change mode"),
    "move": gettext_lazy("Move topic"),
    "pause": gettext_lazy("Pause group"),
    "pause recurring": gettext_lazy("Pause recurring schedule"),
    "publish": gettext_lazy("Publish a test message"),
    "redrive": gettext_lazy("Redrive dead letters"),
    "release": gettext_lazy("Release leases"),
    "replace": gettext_lazy("Edit and redrive"),
    "replay": gettext_lazy("Replay a range"),
    "requeue": gettext_lazy("Requeue quarantined messages"),
    "reschedule": gettext_lazy("Reschedule messages"),
    "resume": gettext_lazy("Resume group"),
    "resume recurring": gettext_lazy("Resume recurring schedule"),
    "retry": gettext_lazy("Retry"),
    "run recurring": gettext_lazy("Run recurring schedule"),
    "seek": gettext_lazy("Seek"),
    "settings": gettext_lazy("Override options"),
}
"""The operations of the audit log, by their names there."""

STATES = {
    "running": gettext_lazy("running"),
    "interrupted": gettext_lazy("interrupted"),
    "ended": gettext_lazy("finished"),
}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:[+-]\d\d:\d\d|Z)?")


_dead_letters = ngettext_lazy("%(number)s dead letter", "%(number)s dead letters", "count")
_deliveries = ngettext_lazy("%(number)s delivery", "%(number)s deliveries", "count")
_groups = ngettext_lazy("%(number)s group", "%(number)s groups", "count")
_jobs = ngettext_lazy("%(number)s job", "%(number)s jobs", "count")
_leases = ngettext_lazy("%(number)s lease", "%(number)s leases", "count")
_messages = ngettext_lazy("%(number)s message", "%(number)s messages", "count")
UNITS = {
    "cancel": _messages,
    "cancel jobs": _jobs,
    "dead_letter": _deliveries,
    "delete quarantined": _messages,
    "deliver now": _messages,
    "discard": _dead_letters,
    "drop": _deliveries,
    "forget": _groups,
    "publish": _messages,
    "redrive": _dead_letters,
    "release": _leases,
    "replace": _dead_letters,
    "replay": _messages,
    "requeue": _messages,
    "reschedule": _messages,
    "retry": _deliveries,
    "seek": _deliveries,
}
"""By action, the text for the number of what it has changed. Others change no countable rows."""


def label_of(action: str) -> str:
    """Return the name of an operation for people. Later releases may have stored others."""
    return str(ACTIONS.get(action, action))


def changed_text(entry: OperationEntry) -> str:
    """Return what an operation has changed so far, such as "120 of 2,000 dead letters"; empty if it counts nothing."""
    unit = UNITS.get(entry.action)
    if unit is None:
        return ""
    is_open = entry.total and entry.state != "ended"
    number = entry.total if is_open else entry.changed
    text = str(unit % {"count": number, "number": f"{number:,}"})
    return _("%(number)s of %(total)s") % {"number": f"{entry.changed:,}", "total": text} if is_open else text


def detail_text(entry: OperationEntry) -> str:
    """Return the arguments of an operation, with times in the project's time zone, and redacted."""
    topic = naming.first_topic(entry.topic)
    return redacted(TIME.sub(_local, entry.detail), topic=topic, kind="error") if entry.detail else ""


def _local(found: re.Match[str]) -> str:
    try:
        at = datetime.datetime.fromisoformat(found[0])
    except ValueError:
        return found[0]
    return found[0] if at.tzinfo is None else moment(int(at.timestamp() * 1000)).removesuffix(".000")


def duration_text(entry: OperationEntry, now: int) -> str:
    """Return how long an operation took, has taken so far, or has made no progress."""
    if entry.state == "ended":
        return duration((entry.ended_at - entry.started_at) / 1000)
    if entry.state == "running":
        return _("%(time)s so far") % {"time": duration((now - entry.started_at) / 1000)}
    silent = duration((now - max(entry.started_at, entry.progress_at)) / 1000)
    return _("no progress for %(time)s") % {"time": silent}
