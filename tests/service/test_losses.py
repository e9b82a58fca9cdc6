"""The wait of a message that is lost with its subscriber again and again."""

from __future__ import annotations

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.inspection import get_overview, message_history, partitions
from django_mysqlqueue.models import DeliveryEvent, DeliveryState
from django_mysqlqueue.operations import dead_lettering, retrying, seeking, steps
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.testing import _advance
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, lag
from tests.support.internals import (
    Action,
    GroupRef,
    Later,
    Session,
    Settlement,
    Want,
    claiming,
    leasing,
    releasing,
    settling,
)

pytestmark = [pytest.mark.promise("Poison messages"), pytest.mark.still_clock]

G = GroupRef("g", "t")
SLOW = Backoff(initial=100, factor=3, maximum=10_000, jitter=0)


def slow(**options):
    return handler(**{"backoff": SLOW, "max_attempts": 10, **options})


def die(sub):
    """Start the one message that the subscriber has, and lose both. Return the message's delivery."""
    held = sub.take()
    if held.claimed.suspect:
        assert settling.record_start(USING, held.claimed)
    assert sub.take() is None
    return held.claimed


def lose(clock, times, **options):
    """Lose the message with as many subscribers, each of which starts it. Return the last delivery."""
    for number in range(times):
        clock.advance(61 if number else 0)
        sub = Sub(slow(**options)).step()
        if not row().delivery_token:  # it has noticed the loss
            sub.leave()
            clock.advance(10_000)
            sub = Sub(slow(**options)).step()
        last = die(sub)
    return last


def lose_twice(clock, **options):
    """Lose the first message that is due, whatever else there is in the partition, with two subscribers."""
    for _ in range(2):
        die(Sub(slow(**options)).step())
        clock.advance(61)


def row():
    return DeliveryState.objects.get(acked=False)


def waits():
    """Seconds until the message is due."""
    return round((row().invisible_until - Session(USING).now()) / 1000)


@both_modes
def test_each_recorded_loss_waits_longer_than_the_one_before(db, clock, mode):
    publish("t", 0, key="k")
    die(Sub(slow(mode=mode)).step())
    clock.advance(61)
    die(Sub(slow(mode=mode)).step())  # the first loss costs nothing
    for expected in (100, 300, 900):
        clock.advance(61)
        finder = Sub(slow(mode=mode)).step()
        assert finder.take() is None
        assert waits() == expected
        finder.leave()
        clock.advance(expected - 5)
        early = Sub(slow(mode=mode)).step()
        assert early.take() is None
        early.leave()
        clock.advance(10)
        last = die(Sub(slow(mode=mode)).step())
        assert last.suspect
    assert last.attempt == 4


@both_modes
def test_the_subscriber_that_notices_a_loss_takes_the_message_when_it_is_due(db, clock, mode):
    publish("t", 0, key="k")
    lose(clock, 2, mode=mode)
    clock.advance(61)
    got = Recorder()
    sub = Sub(slow(mode=mode, function=got))
    sub.settle()
    assert got.payloads == []
    clock.advance(101)
    sub.beat()
    sub.settle()
    assert got.attempts == [(0, 2)]
    assert lag() == 0


@both_modes
def test_the_first_loss_of_a_message_that_has_failed_costs_nothing(db, clock, mode):
    publish("t", 0, key="k")
    Sub(slow(mode=mode, function=lambda delivery: delivery.nack(delay=0))).step().work(1)
    DeliveryState.objects.update(retry_count=7, delivered_by="", delivery_token=0, invisible_until=1)
    clock.advance(61)
    assert not die(Sub(slow(mode=mode)).step()).suspect
    clock.advance(61)
    claimed = Sub(slow(mode=mode)).step().take().claimed
    assert claimed.suspect
    assert claimed.attempt == 8


@both_modes
def test_a_loss_before_the_first_recorded_start_costs_nothing(db, clock, mode):
    publish("t", 0, key="k")
    for _ in range(3):
        sub = Sub(slow(mode=mode)).step()
        assert sub.take() is not None  # is killed before it records the start
        clock.advance(61)
    assert row().retry_count == 0
    assert Sub(slow(mode=mode)).step().take() is not None


@both_modes
def test_a_released_suspect_does_not_wait(db, clock, mode):
    publish("t", 0, key="k")
    lose(clock, 2, mode=mode)
    clock.advance(10_000)
    Sub(slow(mode=mode)).step().leave()
    clock.advance(10_000)
    leaving = Sub(slow(mode=mode)).step()
    assert row().suspect
    leaving.leave()
    again = Sub(slow(mode=mode)).step().take()
    assert again.claimed.suspect
    assert again.claimed.attempt == 2


@both_modes
def test_the_wait_survives_that_the_lost_subscriber_is_released(db, clock, mode):
    """Its supervisor may release it after another subscriber has noticed the loss, and after a replacement has."""
    publish("t", 0, key="k")
    by = lose(clock, 2, mode=mode).by
    shared = [G] if mode == "shared" else []
    releasing.release_all(USING, by, [G], shared=shared)
    finder = Sub(slow(mode=mode)).step()
    assert finder.take() is None
    assert waits() == 100
    assert row().delivered_by == by
    releasing.release_all(USING, by, [G], shared=shared)
    assert waits() == 100
    finder.leave()
    assert Sub(slow(mode=mode)).step().take() is None


def test_in_strict_order_everything_behind_it_waits(db, clock):
    publish("t", 0, key="k")
    lose(clock, 2, on_failure="block")
    publish_many("t", [Message(1, key="k"), Message(2, key="other")])
    clock.advance(61)
    got = Recorder()
    sub = Sub(slow(function=got, on_failure="block"))
    sub.settle()
    assert got.payloads == [2]
    clock.advance(101)
    sub.beat()
    sub.settle()
    assert got.payloads == [2, 0, 1]


def test_in_strict_order_a_lost_message_behind_it_waits_too(db, clock):
    publish_many("t", (Message(number, key="k") for number in range(3)))
    sub = Sub(slow(on_failure="block")).step()
    sub.take()
    clock.advance(61)
    sub = Sub(slow(on_failure="block")).step()
    settling.record_start(USING, sub.take().claimed)
    clock.advance(61)
    heir = Sub(slow(on_failure="block")).step()
    assert heir.take() is None
    assert DeliveryState.objects.filter(delivery_token=0).count() == 1


@pytest.mark.promise("Order")
def test_everything_behind_it_waits_and_no_other_partition(db, clock):
    """Its process was killed twice: that is nobody's decision."""
    publish("t", 0, key="k")
    lose(clock, 2)
    publish_many("t", [Message(1, key="k"), Message(2, key="other")])
    clock.advance(61)
    got = Recorder()
    sub = Sub(slow(function=got))
    sub.settle()
    assert got.payloads == [2]
    sub.poller.reset()
    sub.settle()
    sub.leave()
    heir = Sub(slow(function=got))
    heir.settle()
    assert got.payloads == [2]
    clock.advance(101)
    heir.beat()
    heir.settle()
    assert got.payloads == [2, 0, 1]


@pytest.mark.promise("Order")
def test_what_was_lost_with_it_waits_behind_it(db, clock):
    publish_many("t", (Message(number, key="k") for number in range(4)))
    lose_twice(clock)
    got = Recorder()
    sub = Sub(slow(function=got))
    sub.settle()
    assert got.payloads == []
    clock.advance(101)
    sub.beat()
    sub.settle()
    assert got.payloads == [0, 1, 2, 3]


@pytest.fixture
def three(db, clock):
    """Three messages that wait for another attempt, of which the second one is lost twice in the meantime."""
    publish_many("t", (Message(number, key="k") for number in range(3)))
    got = Recorder(lambda delivery: delivery.snooze(1) if delivery.payload == 1 else delivery.nack(delay=200))
    first = Sub(slow(function=got))
    first.settle()
    first.leave()
    clock.advance(2)
    lose_twice(clock)


@pytest.mark.promise("Order")
def test_a_retry_behind_it_waits_and_one_before_it_does_not(three, clock):
    got = Recorder()
    sub = Sub(slow(function=got))
    sub.settle()
    assert got.payloads == []
    clock.advance(85)  # the wait after the loss takes longer than the others
    sub.beat()
    sub.settle()
    assert got.payloads == [0]
    clock.advance(20)
    sub.beat()
    sub.settle()
    assert got.payloads == [0, 1, 2]


def test_a_claim_takes_nothing_behind_it(three, clock):
    """Whatever the owner remembers of its rows."""
    publish("t", 3, key="k")
    finder = Sub(slow()).step()
    clock.advance(85)
    rows = list(DeliveryState.objects.order_by("message_offset").values_list("message_offset", flat=True))
    want = Want("k", due=tuple(rows), look_at=9)
    request = claiming.ClaimRequest(finder.poller.groups[0].configuration.claimant, [want], claiming.new_token())
    claim = claiming.claim(USING, request)
    assert [one.offset for one in claim.deliveries] == rows[:1]
    assert [row for row, left in claim.left.items() if isinstance(left, Later) and left.is_lost] == [("k", rows[1])]


@pytest.mark.promise("Order")
def test_a_suspect_that_fails_lets_later_messages_overtake_it(db, clock):
    """That is a decision."""
    publish_many("t", (Message(number, key="k") for number in range(3)))
    lose_twice(clock)
    Sub(slow()).step().leave()
    clock.advance(101)
    got = Recorder(lambda delivery: delivery.nack() if delivery.payload == 0 else None)
    sub = Sub(slow(function=got))
    sub.settle()
    assert got.payloads == [0, 1, 2]
    sub.leave()
    publish("t", 3, key="k")
    Sub(slow(function=got)).settle()
    assert got.payloads == [0, 1, 2, 3]


def test_in_shared_mode_messages_behind_it_are_handled(db, clock):
    publish("t", 0, key="k")
    lose(clock, 2, mode="shared")
    publish("t", 1, key="k")
    clock.advance(61)
    got = Recorder()
    Sub(slow(mode="shared", function=got)).settle()
    assert got.payloads == [1]


@pytest.mark.promise("Order")
@pytest.mark.parametrize("act", ["dead-letter", "retry", "retry at a time", "seek"])
def test_an_operator_ends_the_wait_of_its_partition(db, clock, act):
    publish("t", 0, key="k")
    lose(clock, 2)
    publish("t", 1, key="k")
    clock.advance(61)
    got = Recorder()
    sub = Sub(slow(function=got))
    sub.settle()
    assert got.payloads == []
    offset = row().message_offset
    if act == "dead-letter":
        assert dead_lettering.dead_letter_now(USING, G, [offset], actor="ada") == 1
    elif act == "retry":
        assert retrying.make_due(USING, G, actor="ada") == 1
    elif act == "retry at a time":
        due = Session(USING).now() + 3000
        assert retrying.make_due(USING, G, actor="ada", due=due) == 1
        clock.advance(4)
    else:
        seeking.move(USING, G, seeking.Position(offset), actor="ada")
    sub.beat()
    sub.poller.look_now()
    sub.settle()
    assert got.payloads == ([1] if act in ("dead-letter", "seek") else [0, 1])


@both_modes
def test_what_a_lost_subscriber_reports_after_its_loss_was_noticed_is_stale(db, clock, mode):
    publish("t", 0, key="k")
    lose(clock, 1, mode=mode)
    clock.advance(61)
    frozen = Sub(slow(mode=mode)).step()
    held = frozen.take()
    settling.record_start(USING, held.claimed)
    clock.advance(61)
    Sub(slow(mode=mode)).step().leave()
    assert waits() == 100
    frozen.run(held)
    frozen.flush()
    assert waits() == 100
    assert lag() == 1


@both_modes
def test_a_loss_is_recorded_once(db, clock, mode, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    publish("t", 0, key="k")
    lose(clock, 3, mode=mode)
    clock.advance(61)
    Sub(slow(mode=mode)).step().leave()
    clock.advance(10_000)
    Sub(slow(mode=mode)).step()
    lost = DeliveryEvent.objects.filter(outcome="lost").values_list("attempt", "settled_by")
    assert [attempt for attempt, _ in lost.order_by("id")] == [0, 1, 2]
    assert len({by for _, by in lost}) == 3


@both_modes
def test_operators_find_it_waiting_even_if_the_lost_subscriber_lives(db, clock, mode):
    """It was frozen, and the row still names it, because the message is a suspect."""
    publish("t", 0, key="k")
    lose(clock, 1, mode=mode)
    clock.advance(61)
    frozen = Sub(slow(mode=mode)).step()
    settling.record_start(USING, frozen.take().claimed)
    clock.advance(61)
    sub = Sub(slow(mode=mode)).step()
    frozen.beat()
    offset = row().message_offset
    assert retrying.waiting(USING, G, most=5) == 1
    assert retrying.waiting_at(USING, G, [offset]) == [("k", offset)]
    (found,) = dead_lettering.find(USING, G, [offset])
    assert (found.held_by, found.failed) == ("", 1)
    assert retrying.make_due(USING, G, actor="ada") == 1
    sub.poller.look_now()
    assert sub.step().take().claimed.suspect


@both_modes
def test_undoing_a_claim_leaves_suspects_suspects_and_no_others(db, clock, mode):
    publish_many("t", (Message(number, key=f"k{number}") for number in range(2)))
    Sub(slow(mode=mode)).step()
    DeliveryState.objects.filter(partition_key="k1").update(
        delivered_by="", delivery_token=0, retry_count=3, invisible_until=1
    )
    clock.advance(61)
    Sub(slow(mode=mode)).step()
    assert dict(DeliveryState.objects.values_list("partition_key", "suspect")) == {"k0": True, "k1": False}
    for token in list(DeliveryState.objects.values_list("delivery_token", flat=True)):
        claiming.undo(USING, G, token)
    assert not DeliveryState.objects.exclude(delivery_token=0, suspect=False).exists()
    assert {one.partition_key: bool(one.delivered_by) for one in DeliveryState.objects.all()} == {
        "k0": True,
        "k1": False,
    }


def marked():
    return dict(DeliveryState.objects.order_by("pk").values_list("partition_key", "suspect"))


@both_modes
def test_a_claim_marks_what_was_lost_and_nothing_else(db, clock, mode):
    publish_many("t", (Message(number, key=f"k{number}") for number in range(2)))
    with CaptureQueriesContext(connections[USING]) as sent:
        Sub(slow(mode=mode)).step()
        DeliveryState.objects.update(delivered_by="", delivery_token=0, retry_count=3, invisible_until=1)
        clock.advance(61)
        Sub(slow(mode=mode)).step()
    assert not DeliveryState.objects.filter(delivery_token=0).exists()
    assert marked() == {"k0": False, "k1": False}
    written = [one["sql"] for one in sent if not one["sql"].startswith("SELECT")]
    assert [sql for sql in written if "queue_delivery_state" in sql]
    assert not [sql for sql in written if "suspect" in sql]
    DeliveryState.objects.filter(partition_key="k1").update(delivered_by="", delivery_token=0, invisible_until=1)
    clock.advance(61)
    Sub(slow(mode=mode)).step()
    assert marked() == {"k0": True, "k1": False}


@both_modes
@pytest.mark.parametrize(
    ("action", "left"),
    [
        (Action.NACK, (0, False, "", 2)),
        (Action.SNOOZE, (0, False, "", 1)),
        (Action.RELEASE, (0, False, "its subscriber", 1)),
    ],
)
def test_the_mark_goes_with_the_token(db, clock, mode, action, left):
    publish("t", 0, key="k")
    held = lose(clock, 3, mode=mode)
    assert marked() == {"k": True}
    settling.flush(USING, G, [Settlement(held, action, 1000, "no")], max_attempts=10, shared=True)
    by = row().delivered_by and "its subscriber"
    assert (row().delivery_token, row().suspect, by, row().retry_count) == left


@both_modes
def test_a_noticed_loss_takes_the_mark_and_the_next_claim_sets_it_again(db, clock, mode):
    publish("t", 0, key="k")
    lose(clock, 2, mode=mode)
    assert marked() == {"k": True}
    clock.advance(61)
    Sub(slow(mode=mode)).step().leave()
    assert (row().delivery_token, row().suspect) == (0, False)
    clock.advance(101)
    sub = Sub(slow(mode=mode)).step()
    assert (row().delivery_token > 0, row().suspect) == (True, True)
    held = sub.take().claimed
    settling.extend_all(USING, G, [held], milliseconds=1000)
    assert settling.record_start(USING, held)
    settling.ack_here(USING, held)
    assert marked() == {"k": True}, "settled, and the token is there still"


# -- what remembers and shows it --------------------------------------------------


@pytest.fixture
def resting(db, clock):
    """Make a message wait for 100 seconds after its second loss; return the subscriber that noticed it."""

    def make(mode):
        publish("t", 0, key="k")
        lose(clock, 2, mode=mode)
        clock.advance(61)
        finder = Sub(slow(mode=mode)).step()
        assert waits() == 100
        return finder

    return make


@both_modes
def test_its_finder_knows_when_it_is_due(resting, mode):
    """Otherwise it would claim, or poll, in vain until then."""
    finder = resting(mode)
    (group,) = finder.poller.groups
    assert not group.wants_turn()
    assert group.mode.next_at() == row().invisible_until


def test_a_shared_group_that_has_noticed_a_loss_polls_soon(db, clock):
    """The poll tells when the message is due, and whether there are more."""
    publish("t", 0, key="k")
    lose(clock, 2, mode="shared")
    clock.advance(61)
    sub = Sub(slow(mode="shared"))
    sub.poller._tick()
    sub.poller._poll()
    (group,) = sub.poller.groups
    assert group.turn()
    assert waits() == 100
    assert not group.turn()


def test_a_new_owner_reads_when_it_is_due(resting):
    resting("ordered").leave()
    (found,) = leasing.load(Session(USING), G, ["k"])
    assert found.due == row().invisible_until


def test_a_claim_that_asks_for_it_too_early_is_told_when_it_is_due(resting):
    finder = resting("ordered")
    claimant = finder.poller.groups[0].configuration.claimant
    wants = [Want("k", due=(row().message_offset,))]
    claim = claiming.claim(USING, claiming.ClaimRequest(claimant, wants, token=claiming.new_token()))
    assert claim.deliveries == []
    assert claim.left == {("k", row().message_offset): Later(row().invisible_until, is_lost=True)}


@both_modes
def test_a_wait_that_a_wrong_clock_wrote_is_over(resting, clock, mode):
    resting(mode).leave()
    clock.advance(-30)  # later than its claim, earlier than its loss was noticed
    assert Sub(slow(mode=mode)).step().take() is not None


@both_modes
def test_tests_bring_it_nearer(resting, mode):
    resting(mode)
    _advance(USING, 60_000)
    assert waits() == 40


@both_modes
def test_people_see_it_wait(resting, mode):
    resting(mode)
    overview = get_overview(group="g", topic="t", using=USING)
    ((head,),) = [group.heads for group in overview.groups]
    assert (head.delivered_by, head.attempts) == ("", 1)
    assert [(str(group.in_flight), str(group.retrying)) for group in overview.groups] == [("0", "1")]
    assert partitions.in_flight(Session(USING), G) == []
    (state,) = message_history.read_history(Session(USING), row().message_offset).groups
    assert (state.standing, state.until) == ("waits", row().invisible_until)
    assert "not claimed" in steps._locked_text(Session(USING), G, 1.0)
