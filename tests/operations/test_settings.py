"""Options that operators override while subscribers run: what is stored, refused and recorded, and what it changes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from django.db import connection, transaction
from django.db.models import JSONField, Value
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish_many, subscriber
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, Operation, OutboxMessage
from django_mysqlqueue.operations import dropping, seeking
from django_mysqlqueue.operations.seeking import Position
from django_mysqlqueue.options.backoff import Backoff
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread
from tests.support.internals import Session, groups, handlers
from tests.support.scenarios import G, log

ME = "ada"


def override(*, unset=(), **values):
    return operations.settings(*G, values, unset=unset, actor=ME)


def stored():
    return {name: one["value"] for name, one in ConsumerGroup.objects.get(consumer_group="g").overrides.items()}


@pytest.fixture
def registered(db, no_handlers):
    groups.register(USING, G, mode="ordered", start="earliest")


# -- what is stored -----------------------------------------------------------


def test_overrides_are_stored_with_when_and_by_whom_and_unset_one_by_one(registered):
    before = Session(USING).now()
    assert override(max_attempts=3, backoff={"initial": 2}).changed == 2
    row = ConsumerGroup.objects.get().overrides
    assert row["max_attempts"]["value"] == 3
    assert row["max_attempts"]["by"] == ME
    assert before <= row["max_attempts"]["at"] <= Session(USING).now()
    assert override(claim_size=7, unset=["max_attempts"]).changed == 2
    assert stored() == {
        "backoff": {"initial": 2.0, "factor": 2.0, "maximum": 3600.0, "jitter": 0.2},
        "claim_size": 7,
    }
    assert override(unset=["backoff", "claim_size"]).changed == 2
    assert stored() == {}
    assert list(Operation.objects.order_by("id").values_list("action", "detail")) == [
        ("settings", "max_attempts=3, backoff=initial=2s,factor=2,maximum=3600s,jitter=0.2"),
        ("settings", "claim_size=7, max_attempts is no longer overridden"),
        ("settings", "backoff is no longer overridden, claim_size is no longer overridden"),
    ]


def test_what_is_so_already_keeps_its_time_and_is_not_recorded(registered):
    override(max_attempts=None, prefetch=5)
    first = ConsumerGroup.objects.get().overrides
    for values in ({"max_attempts": None}, {"prefetch": 5}):
        for dry_run in (True, False):
            found = operations.settings(*G, values, actor=ME, dry_run=dry_run)
            assert (found.planned, found.changed) == (0, 0)
            assert "is already overridden" in " ".join(found.summary)
    assert "is not overridden" in " ".join(override(unset=["claim_size"]).summary)
    assert ConsumerGroup.objects.get().overrides == first
    assert Operation.objects.count() == 1


def test_a_change_says_what_the_code_says(registered):
    subscriber("t", group="g", max_attempts=4)(lambda delivery: None)
    found = operations.settings(*G, {"max_attempts": 9}, actor=ME, dry_run=True)
    assert found.summary == (
        "max_attempts will be 9, instead of 4 (@subscriber).",
        "The subscribers of the group g/t notice within 10 seconds.",
    )
    assert override(max_attempts=9).summary[0] == "max_attempts is 9 now, instead of 4 (@subscriber)."
    assert override(unset=["max_attempts"]).summary[0] == "max_attempts is no longer overridden: 4 (@subscriber)."


@pytest.mark.parametrize(
    ("values", "unset", "says"),
    [
        ({}, [], "values or unset: pass at least one option"),
        ({"max_attempts": 0}, [], "max_attempts=0: must be from 1"),
        ({"max_attempts": 3, "colour": 1}, [], "there is no option 'colour'"),
        ({"mode": "shared"}, [], "mode cannot change while subscribers run"),
        ({"timeout": 5}, [], "timeout=5 requires an async handler"),
        ({"visibility_timeout": 5}, [], "visibility_timeout=5 has no effect in ordered mode"),
        ({"poll_interval": 5}, [], "poll_interval=5 must be at most max_poll_interval=1"),
        ({"max_attempts": 3}, ["max_attempts"], "max_attempts: cannot be both set and unset"),
        ({}, "max_attempts", "unset 'max_attempts': must be a list"),
        (["prefetch"], [], r"values \['prefetch'\]: must be a mapping of options to values"),
        ({3: 4}, [], "values {3: 4}: must be a mapping of options to values"),
    ],
)
def test_what_is_not_possible_is_refused_with_the_rule_and_nothing_is_stored(registered, values, unset, says):
    subscriber("t", group="g")(lambda delivery: None)
    override(prefetch=5)
    for dry_run in (True, False):
        with pytest.raises(OperationRefused, match=says):
            operations.settings(*G, values, unset=unset, actor=ME, dry_run=dry_run)
    assert stored() == {"prefetch": 5}
    assert Operation.objects.count() == 1


def test_an_override_that_the_code_no_longer_knows_can_be_unset_and_is_in_nobodys_way(registered):
    subscriber("t", group="g")(lambda delivery: None)
    ConsumerGroup.objects.update(overrides={"colour": {"value": "red", "at": 5, "by": "bob"}})
    assert override(prefetch=5).changed == 1
    assert override(unset=["colour"]).changed == 1
    assert stored() == {"prefetch": 5}


def test_an_override_is_not_unset_if_another_one_needs_it(registered):
    subscriber("t", group="g")(lambda delivery: None)
    override(poll_interval=3, max_poll_interval=9)
    with pytest.raises(OperationRefused, match="poll_interval=3 must be at most max_poll_interval=1"):
        override(unset=["max_poll_interval"])
    assert override(unset=["max_poll_interval", "poll_interval"]).changed == 2


def test_an_ignored_override_is_in_nobodys_way(registered):
    """It has become impossible with a deployment."""
    subscriber("t", group="g")(lambda delivery: None)
    ConsumerGroup.objects.update(overrides={"poll_interval": {"value": 3, "at": 5, "by": "bob"}})
    assert override(claim_size=5).changed == 1
    assert override(max_poll_interval=9).changed == 1, "which makes it possible again"


@pytest.mark.parametrize("column", [[], "x", None, {"max_attempts": 5}, {"max_attempts": None}, {"colour": {"at": 5}}])
def test_a_column_that_plain_sql_has_spoilt_is_mended(registered, column):
    ConsumerGroup.objects.update(overrides=Value(column, JSONField()))
    sub = Sub(handler())
    sub.step()
    names = list(column) if isinstance(column, dict) else []
    assert override(prefetch=7, unset=names).changed == 1 + len(names)
    assert stored() == {"prefetch": 7}


def test_two_handlers_of_a_group_are_a_refusal(registered):
    for _ in range(2):
        subscriber("t", group="g")(type("Callable", (), {"__call__": lambda self, delivery: None})())
    with pytest.raises(OperationRefused, match="Two handlers are declared for the group 'g'"):
        override(prefetch=5)


def test_a_seek_or_drop_that_has_not_finished_comes_first(registered):
    ConsumerGroup.objects.update(after_seek="resume", operation=7, paused=True)
    with pytest.raises(OperationRefused, match="A seek of the group 'g' on topic 't' has not finished"):
        override(prefetch=5)
    assert stored() == {}


def test_a_seek_keeps_overrides_and_a_drop_deletes_them(registered):
    override(prefetch=5)
    seeking.move(USING, G, Position(0), actor=ME)
    assert stored() == {"prefetch": 5}
    dropping.drop(USING, G, actor=ME)
    groups.register(USING, G, mode="ordered", start="earliest")
    assert stored() == {}


@pytest.mark.servers_only
def test_two_operators_do_not_undo_each_other(registered):
    """The second waits for the lock of the group row, and adds to what the first has stored."""
    done = []
    thread = threading.Thread(target=lambda: in_thread(lambda: done.append(override(prefetch=5).changed)))
    with transaction.atomic():
        groups.lock(Session(USING), G)
        thread.start()
        time.sleep(0.3)
        assert not done
        ConsumerGroup.objects.update(overrides={"claim_size": {"value": 3, "at": 5, "by": "bob"}})
    thread.join(20)
    assert done == [1]
    assert stored() == {"claim_size": 3, "prefetch": 5}


# -- what it changes ----------------------------------------------------------


def test_attempts_and_backoff_of_messages_that_wait_already(db):
    """They were claimed before; the handler that fails at them goes by the options of now."""
    log(2, "ab")
    got = Recorder(lambda delivery: delivery.nack(reason="no"))
    sub = Sub(handler(function=got, max_attempts=9, backoff=Backoff(initial=5, jitter=0)))
    sub.step()
    override(max_attempts=1)
    sub.step()
    assert sub.work() == 2
    assert [delivery.max_attempts for delivery in got.deliveries] == [1, 1]
    sub.flush()
    assert set(OutboxMessage.objects.values_list("topic", "failed_group")) == {("t_dlq", "g")}
    override(unset=["max_attempts"])
    log(1, "c")
    sub.step()
    override(backoff={"initial": 3600, "maximum": 3600, "jitter": 0})
    sub.step()
    sub.work()
    sub.flush()
    row = DeliveryState.objects.get(acked=False)
    assert row.invisible_until - row.delivered_at == 3_600_000


@pytest.mark.parametrize("failure", ["nack", "raise"])
@pytest.mark.parametrize(("before", "now"), [(9, 1), (1, 9)])
def test_one_that_runs_keeps_the_options_with_which_it_started(db, before, now, failure):
    """It may have told others that this was the last attempt."""
    log(1)
    got = []

    def work(delivery):
        got.append((delivery.max_attempts, delivery.is_last_attempt))
        if failure == "raise":
            raise ValueError("no")
        delivery.nack()

    sub = Sub(handler(function=work, max_attempts=before))
    sub.step()
    held = sub.take()
    override(max_attempts=now)
    sub.step()
    sub.run(held)
    sub.flush()
    assert got == [(before, before == 1)]
    assert OutboxMessage.objects.filter(topic="t_dlq").count() == (before == 1)


def test_the_size_of_claims_and_the_number_that_may_wait(db):
    log(100, "abcdefghij")
    sub = Sub(handler(mode="shared"), handler(group="h", mode="shared"), claim_size=10, prefetch=20)
    sub.step()
    group, other = (next(one for one in sub.poller.groups if one.ref.group == name) for name in "gh")
    assert sub.inbox.waiting(group.ref)[0] == sub.inbox.waiting(other.ref)[0] == 10
    override(prefetch=3, claim_size=2)
    sub.step()
    assert (group.configuration.claim_size, group.planner.room()) == (2, 0)
    while sub.inbox.waiting(group.ref)[0]:
        sub.work(1)
    sub.flush()
    sub.step(times=4)
    assert sub.inbox.waiting(group.ref)[0] == 3
    assert sub.inbox.waiting(other.ref)[0] == 20, "the other group has all of PREFETCH"
    override(unset=["prefetch", "claim_size"])
    sub.step(times=4)
    assert group.configuration.claim_size == 10
    assert sub.inbox.waiting(group.ref)[0] == 10


def test_batches(db):
    log(20, "abcd")
    sizes = []
    sub = Sub(handler(function=lambda batch: sizes.append(len(batch)), batch=True, batch_size=10, mode="shared"))
    sub.step()
    override(batch_size=3)
    sub.step()
    sub.work()
    assert sizes == [3, 3, 3, 3, 3, 3, 2]


def test_the_time_between_polls(db):
    sub = Sub(handler(), handler(group="h"))
    pace = lambda: (sub.poller._pace.initial, sub.poller._pace.maximum)  # noqa: E731
    assert pace() == (0.1, 1.0)
    override(poll_interval=0.02, max_poll_interval=0.05)
    sub.step()
    assert pace() == (0.02, 0.05)
    override(poll_interval=0.5, max_poll_interval=9)
    sub.step()
    assert pace() == (0.1, 1.0), "the other group requires it"
    override(unset=["poll_interval", "max_poll_interval"])
    sub.step()
    assert pace() == (0.1, 1.0)


@pytest.mark.promise("Delivery")
def test_with_a_shorter_visibility_timeout_the_next_extension_is_due_before_the_next_claim_ends(db):
    """Else another subscriber would take what this one still holds."""
    log(4, "ab")
    sub = Sub(handler(mode="shared", visibility_timeout=600.0), claim_size=2, prefetch=2)
    sub.step()
    (group,) = sub.poller.groups
    assert group.wake_at() > time.monotonic() + 100
    before = max(DeliveryState.objects.values_list("invisible_until", flat=True))
    override(visibility_timeout=6)
    sub.step()
    assert group.wake_at() <= time.monotonic() + 2
    assert max(DeliveryState.objects.values_list("invisible_until", flat=True)) == before, "a handler may count on it"
    sub.work()
    sub.step()
    assert DeliveryState.objects.filter(acked=False).count() == 2
    assert max(DeliveryState.objects.values_list("invisible_until", flat=True)) <= Session(USING).now() + 6000


def test_a_timeout_of_async_handlers(db, no_handlers):
    cancelled = []

    @subscriber("t", group="g", max_attempts=1)
    async def slow(delivery):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(delivery.payload)
            raise

    publish_many("t", [Message(1, key="a")])
    sub = Sub(handlers()[G])
    sub.step()
    override(timeout=0.05)
    sub.step()
    assert sub.work() == 1
    assert cancelled == [1]
    sub.flush()
    assert "did not finish within 0.05 s (timeout)" in OutboxMessage.objects.get().last_error


def test_an_override_that_is_not_possible_is_ignored_and_logged_once(db, caplog):
    caplog.set_level("INFO")
    sub = Sub(handler(max_attempts=9))
    sub.step()
    values = {"colour": 1, "max_attempts": 2}
    ConsumerGroup.objects.update(
        overrides={name: {"value": value, "at": 5, "by": "bob"} for name, value in values.items()}
    )
    sub.step(times=3)
    assert sub.poller.groups[0].handler.max_attempts == 2
    events = [record.mysqlqueue for record in caplog.records if record.mysqlqueue["event"].startswith("settings.")]
    assert [(one["event"], one.get("settings") or one["error"][:30]) for one in events] == [
        ("settings.ignored", "there is no option 'colour'. O"),
        ("settings.changed", "max_attempts=2"),
    ]


def test_overrides_come_with_the_query_of_a_tick(db):
    sub = Sub(handler())
    sub.step(times=3)

    def statements():
        with CaptureQueriesContext(connection) as sent:
            sub.step()
        return len(sent)

    before = statements()
    override(max_attempts=3)
    sub.step()
    assert statements() == before
