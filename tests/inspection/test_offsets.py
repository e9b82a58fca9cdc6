"""Lists of partitions with the offsets of groups, and which of them are furthest behind, beside exact counts."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.inspection import Bounds, list_partitions, partitions
from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, PartitionLease, QueueMessage
from django_mysqlqueue.names.keys import lane_of
from tests.support import garbage, oracle
from tests.support.dashboard import WAITS
from tests.support.handlers import both_modes, fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.inspected import backlogs_of
from tests.support.internals import Count, GroupRef, Session, groups

pytestmark = pytest.mark.usefixtures("db")

G = GroupRef("g", "t")


def log(count, keys="ab", topic="t"):
    publish_many(topic, (Message(number, key=keys[number % len(keys)]) for number in range(count)))
    sequence()


def register(ref=G, mode="ordered", start="earliest"):
    groups.register(USING, ref, mode=mode, start=start)


def listed(**given):
    return list(list_partitions(**given).partitions)


def places(**given):
    return [(*one.ref, one.key) for one in listed(**given)]


@both_modes
def test_the_offsets_of_a_partition(mode):
    """12 and 15 are acked, 16 waits, 21 is acked, 24 is in flight, 30 is not claimed: as in the documentation."""
    sub = Sub(handler(mode=mode, function=lambda one: one.payload != 2 or one.nack(), backoff=WAITS), claim_size=5)
    log(5, "a")
    sub.step()
    sub.work(4)
    sub.flush()
    log(1, "a")
    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    (one,) = listed()
    assert (one.ref, one.key) == (G, "a")
    assert (one.watermark, one.position, one.end) == (offsets[1], offsets[4], offsets[5])
    assert one.lag == Count(3)
    assert (one.head.offset, one.head.attempts, one.oldest_at) == (offsets[2], 1, one.head.published_at)
    if mode == "ordered":
        assert (one.owner, one.leased_at) == (sub.name, PartitionLease.objects.get().leased_at)
    else:
        assert (one.owner, one.leased_at) == (None, None)


def test_a_failure_that_blocks_its_partition_holds_the_position_back():
    blocks = handler(group="block", function=fail, backoff=WAITS, on_failure="block")
    skips = handler(group="skip", function=fail, backoff=WAITS)
    sub = Sub(blocks, skips, claim_size=2)
    log(6, "a")
    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    for _ in range(6):
        sub.step()
        sub.work()
        sub.flush()
    block, skip = listed()
    assert block.watermark == skip.watermark == offsets[0] - 1
    assert (block.lag, skip.lag) == (Count(6), Count(6))
    assert block.position < skip.position == offsets[5]


def test_a_group_that_has_read_nothing_is_at_its_start_offset():
    log(4, "ab")
    last = QueueMessage.objects.latest("offset").offset
    register(GroupRef("new", "t"))
    register(GroupRef("late", "t"), start="latest")
    late, *_ = listed(group="late")
    assert (late.watermark, late.position, late.lag, late.head, late.oldest_at) == (last, last, Count(0), None, None)
    new, *_ = listed(group="new")
    assert (new.watermark, new.position, new.lag) == (0, 0, Count(2))
    registered_at = ConsumerGroup.objects.get(consumer_group="new").registered_at
    assert new.oldest_at == max(registered_at, new.head.published_at)
    for given in ({"limit": 1, "after": ("new", "t", "a")}, {"prefix": "b"}):
        assert [(one.key, one.lag) for one in listed(group="new", **given)] == [("b", Count(2))]
    Sub(handler(group="new")).settle()
    assert [one.lag for one in listed(group="new")] == [Count(0), Count(0)]


def test_a_partition_whose_messages_were_deleted_has_no_end(settings):
    sub = Sub(handler())
    log(2, "ab")
    sub.settle()
    settings.MYSQLQUEUE = {"RETENTION": 0}
    QueueMessage.objects.filter(partition_key="a").delete()
    a, b = listed()
    assert (a.end, a.lag, a.head) == (None, Count(0), None)
    assert b.end == b.position == b.watermark
    garbage.collect(USING)
    garbage.collect(USING)
    assert listed() == []


def test_messages_for_another_group_are_at_the_end_and_no_backlog():
    register()
    register(GroupRef("other", "t"))
    log(2, "a")
    QueueMessage.objects.update(target_group="other")
    g, other = listed()
    assert (g.ref.group, g.lag, g.head) == ("g", Count(0), None)
    assert (other.lag, other.end) == (Count(2), g.end)
    found = backlogs_of("g", "t")
    assert (found.lags, found.furthest) == ({"a": Count(0)}, ())


@both_modes
def test_a_message_that_was_passed_is_not_the_oldest_one(mode):
    sub = Sub(handler(mode=mode, filter=parse({"region": ["eu"]})))
    for region in ("us", "us", "eu"):
        publish("t", region, key="a", metadata={"region": region})
    sequence()
    sub.step()
    (one,) = listed()
    newest = QueueMessage.objects.latest("offset").offset
    assert (one.position, one.end, one.lag, one.head.offset) == (newest, newest, Count(1), newest)


def test_the_list_comes_in_pages_over_groups_and_topics():
    refs = [GroupRef("g", "t"), GroupRef("g", "u"), GroupRef("empty", "v"), GroupRef("h", "t")]
    for ref in refs:
        register(ref)
    for topic in "tu":
        log(5, ["a", "b", "c", "B", "é"], topic=topic)
    expected = [(*ref, key) for ref in (refs[0], refs[1], refs[3]) for key in ("B", "a", "b", "c", "é")]
    for limit in (1, 2, 4, 5, 7, 15, 50):
        found, after, pages = [], None, 0
        while True:
            page = list_partitions(limit=limit, after=after)
            found += [(*one.ref, one.key) for one in page.partitions]
            pages += 1
            after = page.after
            if after is None:
                break
            assert len(page.partitions) == limit
        assert found == expected, limit
        assert pages == -(-15 // limit)
    assert places(group="g", prefix="b") == [("g", "t", "b"), ("g", "u", "b")]
    assert places(topic="u") == [("g", "u", key) for key in ("B", "a", "b", "c", "é")]
    assert places(group="nobody") == places(group="h", topic="u") == []


def test_a_page_reads_a_bounded_number_of_groups():
    for number in range(5):
        register(GroupRef(f"g{number}", "t" if number == 4 else f"nothing.{number}"))
    log(1, "a")
    bounds = Bounds(groups=2)
    first = list_partitions(bounds=bounds)
    assert (first.partitions, first.after) == ((), ("g2", "nothing.2", None))
    second = list_partitions(bounds=bounds, after=first.after)
    assert (second.partitions, second.after) == ((), ("g4", "t", None))
    third = list_partitions(bounds=bounds, after=second.after)
    assert [one.key for one in third.partitions] == ["a"]
    assert third.after is None


def test_partitions_of_an_owner():
    one = Sub(handler("t", "g"), handler("u", "g"))
    for topic in "tu":
        log(4, "abcd", topic=topic)
    one.step()
    PartitionLease.objects.filter(partition_key="b").update(leased_by="two")
    PartitionLease.objects.filter(partition_key="c", topic="t").update(leased_by="")
    assert places(owner=one.name) == [
        ("g", "t", "a"),
        ("g", "t", "d"),
        ("g", "u", "a"),
        ("g", "u", "c"),
        ("g", "u", "d"),
    ]
    assert places(owner=one.name, limit=2, after=("g", "t", "a")) == [("g", "t", "d"), ("g", "u", "a")]
    assert places(owner=one.name, prefix="d") == [("g", "t", "d"), ("g", "u", "d")]
    assert places(owner="two", topic="u") == [("g", "u", "b")]
    assert places(owner="") == [("g", "t", "c")]
    assert places(owner="nobody") == []
    assert set(backlogs_of("g", "t", owner=one.name).lags) == {"a", "d"}
    assert set(backlogs_of("g", "t", owner="").lags) == {"c"}
    # A lease of a partition of which nothing else is known.
    PartitionLease.objects.create(consumer_group="g", topic="t", partition_key="x", leased_by="three", leased_at=5)
    (found,) = listed(owner="three")
    assert (found.key, found.position, found.end, found.leased_at) == ("x", 0, None, 5)


def test_priorities_are_partitions_of_their_own():
    register()
    publish("t", 1, key="a")
    publish("t", 2, key="a", priority=10)
    sequence()
    assert [lane_of(one.key) for one in listed()] == [(10, "a"), (0, "a")]
    assert [one.lag for one in listed()] == [Count(1), Count(1)]


@both_modes
def test_they_agree_with_the_exact_counts_of_a_busy_queue(mode):
    sub = Sub(handler(mode=mode, function=fail, max_attempts=2, backoff=WAITS), claim_size=7)
    seen = set()
    for number in range(12):
        log(number * 3, "abcde"[: 1 + number % 5])
        sub.step()
        sub.work(limit=number)
        if number % 3 == 0:
            sub.flush()
        exact = oracle.unsettled_by_partition(Session(USING), G)
        shown = {one.key: (one.lag.value, one.head.offset) for one in listed() if one.lag}
        assert shown == exact
        assert all(one.lag.exact for one in listed())
        found = backlogs_of(*G)
        assert {key: lag.value for key, lag in found.lags.items() if lag} == {
            key: lag for key, (lag, _) in exact.items()
        }
        numbers = [exact[key][0] for key in found.furthest]
        assert numbers == sorted(numbers, reverse=True)
        assert set(found.furthest) == set(exact)
        assert (found.whole, found.uncounted) == (True, 0)
        seen.update(numbers)
    assert len(seen) > 10


def test_furthest_behind_is_the_largest_backlog_and_then_the_lowest_watermark():
    register()
    publish_many("t", (Message(n, key=key) for key, count in (("a", 2), ("b", 5), ("c", 2)) for n in range(count)))
    sequence()
    Sub(handler(), claim_size=1)
    assert backlogs_of(*G).furthest == ("b", "a", "c")
    offset = QueueMessage.objects.filter(partition_key="a").earliest("offset").offset
    ConsumerOffset.objects.create(
        consumer_group="g", topic="t", partition_key="a", offset_acked=offset - 1, offset_claimed=offset - 1
    )
    assert backlogs_of(*G).furthest == ("b", "c", "a")


def test_of_very_many_partitions_the_first_and_the_newest_are_compared(monkeypatch):
    monkeypatch.setattr("tests.support.internals.log.NEWEST", 2)
    register()
    log(8, "abcdefgh")
    bounds = Bounds(surveyed_partitions=3)
    found = backlogs_of(*G, bounds=bounds)
    assert list(found.lags) == ["a", "b", "c", "g", "h"]
    assert not found.whole
    found = backlogs_of(*G, prefix="e", bounds=bounds)
    assert (list(found.lags), found.whole) == (["e"], True)
    log(4, ["ea", "eb", "ec", "ed"])
    found = backlogs_of(*G, prefix="e", bounds=bounds)
    assert (list(found.lags), found.whole) == (["e", "ea", "eb", "ec", "ed"], False)
    assert backlogs_of(*G, bounds=Bounds(surveyed_partitions=12)).whole


def test_a_survey_whose_read_ends_early(monkeypatch):
    """As if the server did not jump from key to key, because other topics have short partitions."""
    monkeypatch.setattr("tests.support.internals.partitions.JUMPS", ())
    monkeypatch.setattr("tests.support.internals.partitions.PROBED", 1)
    monkeypatch.setattr("tests.support.internals.partitions.SHORT", 1)
    monkeypatch.setattr("tests.support.internals.partitions.ROWS", (4,))
    monkeypatch.setattr("tests.support.internals.partitions.MORE", 1)
    monkeypatch.setattr("tests.support.internals.log.NEWEST", 2)
    register()
    publish_many("t", (Message(n, key=key) for key, count in (("a", 13), ("b", 3), ("c", 1)) for n in range(count)))
    sequence()
    found = backlogs_of(*G, bounds=Bounds(surveyed_partitions=3))
    assert (found.lags, found.whole) == ({"a": Count(13), "b": Count(3), "c": Count(1)}, False), "b and c are new"
    found = backlogs_of(*G, prefix="a", bounds=Bounds(surveyed_partitions=3))
    assert (found.lags, found.whole) == ({"a": Count(13)}, False)
    found = backlogs_of(*G, prefix="a", bounds=Bounds(surveyed_partitions=4))
    assert (found.lags, found.whole) == ({"a": Count(13)}, True)


def test_positions_beyond_the_partitions_that_are_compared():
    """The group has read many partitions whose messages are deleted: those between do not hide a position."""
    sub = Sub(handler())
    log(8, "abcdefgh")
    sub.settle()
    QueueMessage.objects.exclude(partition_key__in=("a", "h")).delete()
    log(1, "h")
    found = backlogs_of(*G, bounds=Bounds(surveyed_partitions=2))
    assert (found.lags, found.furthest) == ({"a": Count(0), "h": Count(1)}, ("h",))


def test_counting_stops_when_the_time_is_over_and_says_so():
    register()
    log(6, "abcdef")
    found = backlogs_of(*G, bounds=Bounds(seconds=0.0, piece=2))
    assert found.lags == {"a": Count(1), "b": Count(1), **dict.fromkeys("cdef")}
    assert (found.furthest, found.uncounted, found.whole) == (("a", "b"), 4, True)


def test_long_partitions_are_counted_again_up_to_the_limit():
    register()
    publish_many("t", (Message(n, key=key) for key, count in (("a", 5), ("b", 30), ("c", 12)) for n in range(count)))
    sequence()
    bounds = Bounds(depth=3, partition_count=20)
    found = backlogs_of(*G, bounds=bounds)
    assert found.lags == {"a": Count(5), "b": Count(20, exact=False), "c": Count(12)}
    assert found.furthest == ("b", "c", "a")
    (one,) = list_partitions(prefix="b", bounds=bounds).partitions
    assert one.lag == Count(20, exact=False)
    late = Bounds(depth=3, partition_count=20, seconds=0.0)
    assert backlogs_of(*G, bounds=late).lags == dict.fromkeys("abc", Count(3, exact=False))


def test_the_backlogs_are_those_of_one_group():
    log(6, "ab")
    log(2, "a", topic="u")
    for ref in (GroupRef("a", "t"), G, GroupRef("g", "u")):
        register(ref)
    Sub(handler(group="a")).settle()
    assert backlogs_of("a", "t").lags == dict.fromkeys("ab", Count(0))
    assert backlogs_of(*G).lags == dict.fromkeys("ab", Count(3))
    assert backlogs_of("g", "u").lags == {"a": Count(2)}


def test_an_unknown_group():
    assert backlogs_of("nobody", "t") is None
    assert partitions.keys(Session(USING), GroupRef("nobody", "t")) == []
