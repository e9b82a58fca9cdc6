"""Operations on subscribers: release leases, forget a lost subscriber."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from django.utils.translation import gettext as _

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.operations.arguments import texts
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.lookups import check_known, group_of, known_names
from django_mysqlqueue.operations.results import Result, result_of, sentence
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import heartbeats, leasing
from django_mysqlqueue.sql.session import Session


@spelled_out
def release(group: str, topic: str, keys: Sequence[str], **how: Unpack[How]) -> Result:
    """Release the leases of partitions, so that any subscriber of the group can take them.

    The owner notices with its next claim or heartbeat. Messages that it has claimed and not settled are redelivered.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        keys: partition keys.

    Raises:
        OperationRefused: there is no such group, it is shared, or one of the partitions has no lease.
    """
    with operating(how, group=group, topic=topic) as (alias, by, dry_run):
        found = group_of(alias, group, topic)
        ref = found.ref
        if found.mode == ConsumerGroup.Mode.SHARED:
            text = _("The group %(ref)s is shared: its subscribers hold no leases, and claim from all partitions.")
            raise OperationRefused(text % {"ref": ref})
        keys = texts("keys", keys)
        owners = leasing.owners(Session(alias), ref, keys)
        check_known(f"The group {ref} has no leases on these partitions: {{}}.", keys, owners)
        number = sum(bool(owner) for owner in owners.values()) if dry_run else leasing.revoke(alias, ref, keys, **by)
        text = sentence(
            number,
            dry_run=dry_run,
            planned=_(
                "Partitions of the group %(ref)s whose leases will be released: %(number)s. Another subscriber takes "
                "them over within seconds, and messages in flight there will be redelivered."
            ),
            done=_("Partitions of the group %(ref)s whose leases were released: %(number)s."),
            nothing=_("No subscriber of the group %(ref)s holds these leases."),
        )
        return result_of(Result, leasing.RELEASE, number, text % {"ref": ref, "number": f"{number:,}"}, dry_run=dry_run)


@spelled_out
def forget(subscriber: str, **how: Unpack[How]) -> Result:
    """Forget a lost subscriber: its leases are released at once, instead of when they expire.

    Args:
        subscriber: name of the subscriber, as the dashboard and ``queuestatus`` show it.

    Raises:
        OperationRefused: there is no such subscriber, or it is live.
    """
    with operating(how, subscriber=subscriber) as (alias, by, dry_run):
        session = Session(alias)
        known = heartbeats.names(session)
        if subscriber not in known:
            names = known_names("Subscribers", subscriber, dict.fromkeys(known))
            raise OperationRefused(f"There is no subscriber {subscriber!r}.", known=names)
        lease_ms = int(get_settings().lease_duration * 1000)
        if dry_run:
            number = heartbeats.count_lost(session, subscriber, lease_ms)
        else:
            number = heartbeats.remove(alias, subscriber, **by, lease_ms=lease_ms)
        text = sentence(
            number,
            dry_run=dry_run,
            planned=_(
                "The subscriber %(name)s will be forgotten and its leases released. Its process must not be running."
            ),
            done=_("The subscriber %(name)s is forgotten; its leases are released."),
            nothing=_("The subscriber %(name)s is already forgotten."),
        )
        return result_of(
            Result, heartbeats.FORGET, number, text % {"name": subscriber, "number": number}, dry_run=dry_run
        )
