"""The locks of the protocol: each holds up what it must, and they are taken in the one order."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor, wait
from unittest import mock

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import DeliveryState, OutboxMessage
from django_mysqlqueue.operations import dead_lettering, group_mode
from django_mysqlqueue.operations.dead_lettering import dead_letter_now
from django_mysqlqueue.service import claiming, groups, heartbeats, leasing, sequencing, settling, watermarks
from django_mysqlqueue.service.claiming import Claimant, Want
from django_mysqlqueue.service.deliveries import Action, Settlement
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql import dialect_of, session
from django_mysqlqueue.sql.session import flat
from tests.support.harness import USING, in_thread, sequence
from tests.support.statistics import SIZES, pinned

pytestmark = pytest.mark.servers_only
G = GroupRef("g", "t")
CLAIMANT = Claimant(G, "owner", 5, None)


@pytest.fixture
def owned(db):
    """A partition with two messages, leased by "owner"."""
    groups.register(USING, G, mode="ordered", start="earliest")
    publish_many("t", [Message(n, key="k") for n in range(2)])
    sequence()
    heartbeats.beat(USING, "owner", [G], {})
    assert leasing.acquire(USING, G, "owner", ["k"], lease_ms=30_000).held == {"k"}
    watermarks.create_missing(USING, G, ["k"])


def impatiently(function):
    def run():
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        return function()

    return in_thread(run)


class Thread:
    """A function on a thread, and so on a connection, of its own, which may wait."""

    def __init__(self, function):
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._future = self._pool.submit(self._run, function)

    def _run(self, function):
        try:
            return function()
        finally:
            connections.close_all()

    def is_over(self, *, within):
        return not wait([self._future], within).not_done

    def result(self):
        try:
            return self._future.result(30)
        finally:
            self._pool.shutdown()


def claim(token=1, look_at=1, settlements=()):
    return claiming.claim(
        USING, claiming.ClaimRequest(CLAIMANT, [Want("k", look_at=look_at)], token=token, settlements=settlements)
    ).deliveries


def test_a_claim_under_way_keeps_its_group_from_being_paused(owned):
    def pause():
        with transaction.atomic():
            groups.wait_for_claims(sequencing.Session(USING), G)

    with transaction.atomic():
        assert claim()
        with pytest.raises(OperationalError, match="1205"):
            impatiently(pause)
    impatiently(pause)


def test_a_claim_under_way_keeps_its_lease(owned):
    with transaction.atomic():
        assert claim()
        in_thread(lambda: heartbeats.deregister(USING, "owner", [G]))
        in_thread(lambda: heartbeats.beat(USING, "thief", [G], {}))
        found = impatiently(lambda: leasing.acquire(USING, G, "thief", ["k"], lease_ms=30_000))
        assert not found.held
    assert in_thread(lambda: leasing.acquire(USING, G, "thief", ["k"], lease_ms=30_000)).held == {"k"}


def test_a_claim_under_way_keeps_its_groups_mode(owned):
    """What comes behind the change finds the other mode, and no lease."""
    in_thread(lambda: heartbeats.deregister(USING, "owner", [G]))

    def change():
        group_mode.set_mode(USING, G, "shared", lease_ms=30_000)

    with transaction.atomic():
        assert claim()
        with pytest.raises(OperationalError, match="1205"):
            impatiently(change)
    impatiently(change)
    found = claiming.claim(USING, claiming.ClaimRequest(CLAIMANT, [Want("k", look_at=1)], token=2))
    assert (found.deliveries, found.lost, found.other_mode) == ([], {"k"}, "shared")


@pytest.mark.parametrize("size", SIZES)
def test_what_is_locked_is_what_is_named(owned, size):
    """With few rows, too, where another index looks as good: a handler's row is in nobody's way."""
    rows = [DeliveryState(consumer_group="g", topic="t", partition_key="k", message_offset=n) for n in range(4)]
    DeliveryState.objects.bulk_create(rows)
    dialect, named = dialect_of(connection), [("k", 1), ("k", 3)]
    read = (
        f"SELECT s.acked FROM {dialect.rows(('k', 'o'), 2)} {dialect.join_to('queue_delivery_state', 's')} ON {BY_ROW}"
    )
    statements = (
        read + dialect.for_update,
        dialect.update_joined("queue_delivery_state", ("k", "o"), 2, BY_ROW, {"acked": "1"}),
        dialect.delete_joined("queue_delivery_state", ("k", "o"), 2, BY_ROW),
    )

    def send(sql):
        with connection.cursor() as cursor:
            cursor.execute(sql, (*flat(named), *G))

    with pinned(connection, size):
        with transaction.atomic():
            DeliveryState.objects.filter(pk=("g", "t", "k", 2)).update(acked=True)
            for sql in statements:
                impatiently(lambda sql=sql: send(sql))
        assert list(DeliveryState.objects.values_list("message_offset", flat=True)) == [0, 2]


def test_one_sequences_at_a_time(db):
    sequence()  # the mutex's row
    publish("t", 0)
    with transaction.atomic():
        assert sequencing.sequence(USING).moved == 1
        in_thread(lambda: publish("t", 1))
        assert impatiently(lambda: sequencing.sequence(USING)).busy
    assert in_thread(lambda: sequencing.sequence(USING)).moved == 1


def test_undoing_a_claim_waits_until_it_is_over(owned, monkeypatch):
    monkeypatch.setattr(session, "ATTEMPTS", 1)  # each waits for a second
    with transaction.atomic():
        (delivery,) = claim(token=7)
        with pytest.raises(OperationalError, match="1205"):
            impatiently(lambda: claiming.undo(USING, G, 7))
    impatiently(lambda: claiming.undo(USING, G, 7))
    assert not settling.record_start(USING, delivery)  # the token is gone


def waiting():
    """The first message of the partition waits for another attempt; its offset."""
    (delivery,) = claim()
    settling.flush(USING, G, [Settlement(delivery, Action.NACK, 0, "no")], max_attempts=5, shared=False)
    return delivery.offset


def redelivery(offset, token=2):
    return claiming.claim(USING, claiming.ClaimRequest(CLAIMANT, [Want("k", due=(offset,))], token=token))


def test_a_claim_under_way_keeps_its_message_from_being_dead_lettered(owned):
    """The operation waits for it, and then finds the message held."""
    offset = waiting()
    with transaction.atomic():
        (delivery,) = redelivery(offset).deliveries
        giving_up = Thread(lambda: dead_letter_now(USING, G, [offset], actor="ada"))
        assert not giving_up.is_over(within=0.5)
    with pytest.raises(OperationRefused, match="is held by the live subscriber 'owner'"):
        giving_up.result()
    assert settling.record_start(USING, delivery)  # it is still the claim's
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_message_that_is_being_dead_lettered_is_not_claimed(owned, end):
    offset = waiting()
    with transaction.atomic():
        assert giving_up_here(offset) == 1
        claiming_it = Thread(lambda: redelivery(offset))
        assert not claiming_it.is_over(within=0.5)
        transaction.set_rollback(end == "rollback")
    found = claiming_it.result()
    assert [one.offset for one in found.deliveries] == ([offset] if end == "rollback" else [])
    assert OutboxMessage.objects.filter(failed_group="g").count() == (end == "commit")


def giving_up_here(offset):
    """In the transaction that is open, which a request's own connection would not join."""
    with mock.patch.object(dead_lettering, "apart", contextlib.nullcontext):
        return dead_letter_now(USING, G, [offset], actor="ada")


def test_dead_lettering_locks_in_the_one_order(owned):
    offset = waiting()
    with CaptureQueriesContext(connection) as captured:
        dead_letter_now(USING, G, [offset], actor="ada")
    assert locked_tables(captured) == ["queue_consumer_groups", "queue_offsets", "queue_delivery_state"]
    is_locking = [bool(re.search("FOR UPDATE|INSERT INTO `?queue_outbox", q["sql"])) for q in captured]
    last = max(place for place, one in enumerate(is_locking) if one)
    assert "INSERT INTO queue_outbox" in captured[last]["sql"]


def locked_tables(captured):
    """The tables of the locking reads, in the order in which they were first locked."""
    locking = [q["sql"] for q in captured if re.search("FOR UPDATE|SHARE MODE", q["sql"])]
    return list(dict.fromkeys(re.search(r"(?:FROM|JOIN) `?(queue_\w+)", sql)[1] for sql in locking))


def test_a_claim_locks_in_the_one_order(owned):
    first = claim(token=1)
    with CaptureQueriesContext(connection) as captured:
        claim(token=2, settlements=[Settlement(first[0], Action.NACK, 1000, "no")])
    order = ["queue_consumer_groups", "queue_partition_leases", "queue_offsets", "queue_delivery_state"]
    assert locked_tables(captured) == order
