"""The locks of the protocol: each holds up what it must, and they are taken in the one order."""

from __future__ import annotations

import re

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.service import (
    claiming,
    groups,
    heartbeats,
    leasing,
    sequencing,
    settling,
    transactions,
    watermarks,
)
from django_mysqlqueue.service.claiming import Claimant, Want
from django_mysqlqueue.service.deliveries import Kind, Outcome
from django_mysqlqueue.service.groups import GroupRef
from tests.harness import USING, in_thread, sequence

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


def claim(token=1, look_at=1, outcomes=()):
    return claiming.claim(USING, CLAIMANT, [Want("k", look_at=look_at)], token=token, outcomes=outcomes).deliveries


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


def test_one_sequences_at_a_time(db):
    sequence()  # the mutex's row
    publish("t", 0)
    with transaction.atomic():
        assert sequencing.sequence(USING).moved == 1
        in_thread(lambda: publish("t", 1))
        assert impatiently(lambda: sequencing.sequence(USING)).busy
    assert in_thread(lambda: sequencing.sequence(USING)).moved == 1


def test_undoing_a_claim_waits_until_it_is_over(owned, monkeypatch):
    monkeypatch.setattr(transactions, "ATTEMPTS", 1)  # each waits for a second
    with transaction.atomic():
        (delivery,) = claim(token=7)
        with pytest.raises(OperationalError, match="1205"):
            impatiently(lambda: claiming.undo(USING, G, 7))
    impatiently(lambda: claiming.undo(USING, G, 7))
    assert not settling.record_start(USING, delivery)  # the token is gone


def test_a_claim_locks_in_the_one_order(owned):
    first = claim(token=1)
    with CaptureQueriesContext(connection) as captured:
        claim(token=2, outcomes=[Outcome(first[0], Kind.NACK, 1000, "no")])
    locking = [q["sql"] for q in captured if re.search("FOR UPDATE|SHARE MODE", q["sql"])]
    tables = list(dict.fromkeys(re.search(r"(?:FROM|JOIN) (queue_\w+)", sql)[1] for sql in locking))
    order = ["queue_consumer_groups", "queue_partition_leases", "queue_offsets", "queue_delivery_state"]
    assert tables == order
