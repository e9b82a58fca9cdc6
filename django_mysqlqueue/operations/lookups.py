"""Look up the groups, topics and messages that arguments name; unknown names are refused with similar ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from django_mysqlqueue.db.tables import LOG, STATE
from django_mysqlqueue.exceptions import KnownNames, OperationRefused
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.options.topics import dlq_topic, first_topic
from django_mysqlqueue.service import groups, log
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import close_names, did_you_mean, listed


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A registered group, as operations find it."""

    ref: GroupRef
    mode: str
    paused: bool
    after_seek: str
    """The group's state after an unfinished seek, drop or move of it; empty if there is none."""


def group_of(using: str, group: str, topic: str, *, unfinished: Collection[str] = ()) -> FoundGroup:
    """Return a registered group; refuse another one, and one with an unfinished operation.

    ``unfinished``: those of ``"seek"``, ``"drop"`` and ``"move"`` that may be unfinished when the operation begins.
    """
    ref = GroupRef(group, topic)
    rows = ConsumerGroup.objects.using(using).filter(consumer_group=group, topic=topic)
    row = rows.values_list("mode", "paused", "after_seek").first()
    if row is not None:
        found = FoundGroup(ref, *row)
        if groups.unfinished(found.after_seek) not in unfinished:
            groups.refuse_unfinished(ref, found.after_seek)
        return found
    refs = {one: one.topic for one in groups.registered_refs(using)}
    raise OperationRefused(groups.no_group_text(ref), known=KnownNames(refs, partial(_registered_or_meant, ref)))


def _registered_or_meant(ref: GroupRef, refs: Collection[GroupRef]) -> str:
    """Return the end of an error about an unknown group: registered ones, and similar ones."""
    text = f"Registered: {listed([_named(one) for one in refs])}."
    if GroupRef(ref.topic, ref.group) in refs:
        return f"{text} Pass the group first, then the topic: {ref.topic} {ref.group}"
    meant = [
        *(GroupRef(name, ref.topic) for name in close_names(ref.group, [one.group for one in refs])),
        *(GroupRef(ref.group, name) for name in close_names(ref.topic, [one.topic for one in refs])),
    ]
    return f"{text} {did_you_mean(_named(one) for one in meant if one in refs)}".rstrip()


def check_topic(using: str, topic: str) -> None:
    """Require that a topic exists. A DLQ topic exists if its topic does, and vice versa."""
    known = log.known(Session(using))
    if not {topic, first_topic(topic), dlq_topic(topic)} & set(known):
        names = known_names("Topics", topic, {one: one for one in known})
        raise OperationRefused(f"There is no topic {topic!r}.", known=names)


def check_known(text: str, wanted: Iterable[object], known: Collection[object]) -> None:
    """Require that offsets, ids, partition keys or names exist.

    ``text``: text of the error, with ``{}`` for the unknown ones.
    """
    unknown = [one for one in dict.fromkeys(wanted) if one not in known]
    if unknown:
        raise OperationRefused(text.format(listed([repr(one) for one in unknown])))


def unsettled_by_id(using: str, ref: GroupRef, ids: Sequence[str]) -> dict[str, list[int]]:
    """Return the offsets of messages that a group has claimed and not settled, by the ids that ``publish`` returned.

    A redriven message has the id of the original. Ids are unique within a key, so an id may have several offsets. This
    reads the group's unsettled deliveries along their index.
    """
    session = Session(using)
    return _by_id(
        session,
        f"FROM {STATE} s{session.dialect.force_index('queue_delivery_state_due')} "
        f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = s.message_offset "
        "WHERE s.consumer_group = %s AND s.topic = %s AND s.acked = %s",
        (*ref, False),
        ids,
    )


def dead_letters_by_id(using: str, dlq_topic: str, ids: Sequence[str]) -> dict[str, list[int]]:
    """Return the offsets of dead letters in a DLQ topic, by the ids that ``publish`` returned.

    Several groups may have dead-lettered a message. This reads the DLQ topic along its index.
    """
    session = Session(using)
    return _by_id(
        session,
        f"FROM {LOG} m{session.dialect.force_index('queue_messages_partition')} "
        "WHERE m.topic = %s AND m.failed_group <> ''",
        (dlq_topic,),
        ids,
    )


def _by_id(session: Session, source: str, parameters: Sequence[object], ids: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for chunk in session.chunks(sorted(set(ids)), weight=len):
        rows = session.rows(
            f"SELECT {log.PUBLISHED_ID}, m.`offset` {source} "
            f"AND {log.PUBLISHED_ID} IN ({session.dialect.placeholders(len(chunk), '%s')})",
            (*parameters, *chunk),
        )
        for message_id, offset in rows:
            found.setdefault(message_id, []).append(int(offset))
    return found


def known_names(kind: str, name: str, topics: Mapping[str, str | None]) -> KnownNames:
    """Return the help in an error about an unknown name: those that exist, and similar ones.

    ``kind``: what they name, as the help begins: ``Topics``. ``topics``: the names that exist, each with its topic, or
    None.
    """
    return KnownNames(topics, partial(_listed_or_meant, kind, name))


def _listed_or_meant(kind: str, name: str, known: Collection[str]) -> str:
    return f"{kind}: {listed(list(known))}. {did_you_mean(close_names(name, known))}".rstrip()


def _named(ref: GroupRef) -> str:
    return f"{ref.group} on {ref.topic}"
