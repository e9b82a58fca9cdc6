"""Publish a test message: the preview says who will receive it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.db.tables import GROUPS, LOG, OUTBOX
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.rules import relayed_topic
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.results import PublishResult, result_of
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import audit, groups, heartbeats, log, messages, publishing
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.messages import Message, OutboxRow
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.subscriptions.options import filter_of
from django_mysqlqueue.text.humanize import duration, moment

PUBLISH = audit.Action("publish", gettext_lazy("Publish a test message"), audit.MESSAGES)
NEWEST = 1000
"""Number of the newest rows of the outbox that are searched for the id: it has no index on ids."""
MOST_GROUPS = 50
"""Maximum number of groups that a preview names."""


@spelled_out
def publish(
    topic: str,
    payload: Any,
    *,
    key: str | None = None,
    id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    delay: float | datetime.timedelta | None = None,
    deliver_at: datetime.datetime | None = None,
    priority: int = 0,
    expires_at: datetime.datetime | None = None,
    expires_in: float | datetime.timedelta | None = None,
    **how: Unpack[How],
) -> PublishResult:
    """Publish a message as an operator, for example to test a handler.

    This calls ``django_mysqlqueue.publish`` and records who published the message in the audit log, in one transaction.
    The audit log has the id of the message, not its contents.

    If you pass an ``id``, you can repeat the call: if the log has the message, or the newest 1,000 messages of the
    outbox do, nothing is published and ``changed`` is 0. If two calls run at the same time, the sequencer drops the
    second message as a duplicate.

    Args:
        topic: as in ``django_mysqlqueue.publish``.
        payload: likewise.
        key: likewise.
        id: likewise.
        metadata: likewise.
        delay: likewise.
        deliver_at: likewise.
        priority: likewise.
        expires_at: likewise.
        expires_in: likewise.
        using: as in ``django_mysqlqueue.publish``.
        dry_run: change nothing; return who will receive the message.

    Returns:
        The result, with the id of the message.

    Raises:
        InvalidMessage: a value breaks a rule of ``django_mysqlqueue.publish``. The error names the value and the rule.
        OperationRefused: an argument is invalid, or the topic is a queue of jobs.
    """
    using = how.get("using")
    message = Message(payload, key, id, metadata, delay, deliver_at, priority, expires_at, expires_in)
    with operating(how, topic=topic) as (home, by, dry_run):
        if job_queues.is_queue(topic):
            raise OperationRefused(
                f"The topic {topic!r} is a queue of jobs. A message there could run any task with any arguments: "
                "enqueue the job in code instead."
            )
        row = publishing.check(topic, message)
        message = dataclasses.replace(message, id=row.message_id)
        stored, _stored_topic = publishing.stored_at(topic, using, None)
        found = {"message_id": row.message_id, "partition_key": row.partition_key, "database": stored}
        with apart(stored):
            if (offset := _find(home, stored, row)) is not None:
                said = _already(row, offset, dry_run=dry_run)
                return result_of(PublishResult, PUBLISH, 0, said, dry_run=dry_run, **found)
            if not dry_run:
                run(stored, lambda session: _publish(session, topic, message, using, by))
                said = _("The message %(id)s is published to the topic %(topic)s.")
                return result_of(
                    PublishResult, PUBLISH, 1, said % {"id": row.message_id, "topic": topic}, dry_run=False, **found
                )
        session, stored_metadata = Session(home), messages.decode_metadata(row.metadata)
        receivers, warnings = _receivers(session, topic, stored_metadata)
        return result_of(
            PublishResult,
            PUBLISH,
            1,
            *_summary(topic, row, message, home, stored),
            *receivers,
            dry_run=True,
            warnings=(*_unknown(session, topic), *warnings),
            **found,
        )


def _publish(session: Session, topic: str, message: Message, using: str | None, by: By) -> None:
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    publishing.publish(topic, using=using, **fields)
    audit.once(session, PUBLISH, 1, GroupRef("", topic), detail=f"id {message.id}", **by)


def _find(home: str, stored: str, row: OutboxRow) -> int | None:
    """Return the offset of the message with the id in the log, 0 if the outbox has it, None if neither has.

    Nothing is locked: of two calls at the same time, both may publish. The sequencer drops the second message.
    """
    session = Session(home)
    in_log = session.row(
        f"SELECT `offset` FROM {LOG}{session.dialect.force_index('queue_messages_id')} "
        "WHERE topic = %s AND partition_key = %s AND id = %s",
        (row.topic, row.partition_key, row.message_id),
    )
    if in_log is not None:
        return int(in_log[0])
    session = Session(stored)
    in_outbox = session.row(
        f"SELECT 1 FROM (SELECT topic, partition_key, id FROM {OUTBOX}{session.dialect.force_index('PRIMARY')} "
        "WHERE outbox_id > 0 ORDER BY outbox_id DESC LIMIT %s) w WHERE w.id = %s AND w.partition_key = %s "
        "AND w.topic IN (%s, %s)",
        (NEWEST, row.message_id, row.partition_key, row.topic, relayed_topic(row.topic, home)),
    )
    return None if in_outbox is None else 0


def _already(row: OutboxRow, offset: int, *, dry_run: bool) -> str:
    if not dry_run:
        said = _("The message %(id)s is already published to the topic %(topic)s. It was not published again.")
        return said % {"id": row.message_id, "topic": row.topic}
    place = _("offset %(offset)s") % {"offset": offset} if offset else _("the outbox")
    return _(
        "A message with the id %(id)s is in the partition %(key)s already (%(place)s). A second one would be dropped "
        "as a duplicate: choose another id."
    ) % {"id": row.message_id, "key": row.partition_key, "place": place}


def _summary(topic: str, row: OutboxRow, message: Message, home: str, stored: str) -> list[str]:
    """Return sentences about the message: its size, its partition, its times and its database."""
    said = [
        _("A message of %(size)s bytes with the id %(id)s will be published to the topic %(topic)s, partition %(key)s.")
        % {
            "size": f"{len(row.payload):,}",
            "id": row.message_id,
            "topic": topic,
            "key": row.partition_key or _("with the empty key"),
        }
    ]
    if stored != home:
        text = _("It is stored in the database %(stored)s; subscribers relay it to %(home)s, where the topic is.")
        said.append(text % {"stored": stored, "home": home})
    elif get_settings().topics.aliases():
        said.append(_("It is stored in the database %(home)s.") % {"home": home})
    if row.delay_ms:
        text = _("It is scheduled: it comes due %(delay)s after it is published.")
        said.append(text % {"delay": duration(row.delay_ms / 1000)})
    elif message.deliver_at is not None:
        text = _("It is scheduled: it comes due at %(time)s; at once if this time has passed.")
        said.append(text % {"time": moment(row.deliver_at)})
    if row.expires_at is not None:
        text = _("It expires: a group that has not started it by %(time)s does not handle it.")
        said.append(text % {"time": moment(row.expires_at)})
    if row.expires_in_ms is not None:
        text = _("It expires: a group that has not started it within %(time)s does not handle it.")
        said.append(text % {"time": duration(row.expires_in_ms / 1000)})
    return said


def _unknown(session: Session, topic: str) -> list[str]:
    """Return a warning about a topic that is not known."""
    if topic in log.known(session):
        return []
    return [_("The topic %(topic)s is new: no message, consumer group or setting names it.") % {"topic": topic}]


def _receivers(session: Session, topic: str, metadata: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return a sentence about each group on a topic, and warnings if none receives the message."""
    columns = ("consumer_group", "paused", "after_seek", *OptionColumns._fields)
    rows = sorted(
        session.rows(
            f"SELECT {', '.join(columns)} FROM {GROUPS} WHERE topic = %s LIMIT %s",
            (topic, MOST_GROUPS + 1),
        )
    )
    if not rows:
        return [], [_("No consumer group reads the topic, so no handler will receive the message.")]
    shown = rows[:MOST_GROUPS]
    refs = [GroupRef(row[0], topic) for row in shown]
    live = heartbeats.live(session, refs, int(get_settings().lease_duration * 1000))
    said, missed = [], 0
    for ref, (_name, paused, after_seek, *options) in zip(refs, shown, strict=True):
        text, receives = _receiver(ref, metadata, after_seek, options, paused=bool(paused), is_live=bool(live[ref]))
        said.append(text)
        missed += not receives
    if len(rows) > MOST_GROUPS:
        said.append(
            _("The topic has more consumer groups. Only the first %(number)s are shown.") % {"number": len(shown)}
        )
    warnings = [_("No consumer group will receive the message.")] if missed == len(rows) else []
    return said, warnings


def _receiver(
    ref: GroupRef, metadata: Mapping[str, Any], after_seek: str, options: Sequence[str], *, paused: bool, is_live: bool
) -> tuple[str, bool]:
    """Return a sentence about whether and when a group receives the message, and whether it does."""
    try:
        policy = filter_of(OptionColumns(*options))
    except ValueError as error:
        text = _("%(ref)s waits: this release cannot parse its filter (%(error)s).")
        return text % {"ref": ref, "error": error}, True
    if policy is not None and not policy.matches(metadata):
        text = _("%(ref)s will not receive it: its filter does not match. %(why)s")
        return text % {"ref": ref, "why": policy.explain(metadata)}, False
    action = groups.unfinished(after_seek)
    if action == "drop":
        return _("%(ref)s will not receive it: the group is being dropped.") % {"ref": ref}, False
    if action:
        text = _("%(ref)s will receive it after an unfinished operation on the group (%(action)s) has ended.")
        return text % {"ref": ref, "action": action}, True
    if paused:
        return _("%(ref)s will receive it after the group is resumed. It is paused.") % {"ref": ref}, True
    if not is_live:
        return _("%(ref)s will receive it when a subscriber is running. It has no live subscriber.") % {
            "ref": ref
        }, True
    return _("%(ref)s will receive it.") % {"ref": ref}, True
