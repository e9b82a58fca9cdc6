"""Partitions divided up by hand: --partition and --shard."""

from __future__ import annotations

import json

import pytest
from django.core.management import CommandError, call_command
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import PartitionLease
from tests.support.handlers import Recorder, stuck
from tests.support.harness import USING, Sub, handler, lag
from tests.support.internals import EVERYTHING, GroupRef, Session, Subset
from tests.support.scenarios import rebalance

REF = GroupRef("g", "t")
KEYS = [f"{name}/{number}" for name in ("celery", "kombu") for number in range(10)]
CELERY = Subset.parse(["celery/*"])
MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


# -- what a subset is ---------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "shard", "text"),
    [
        ([], None, ""),
        (["celery/*"], None, "celery/*"),
        (["b", "a", "b"], None, "a, b"),
        ([], "1/4", "shard 1/4"),
        ([], "1/1", ""),
        (["a*", "*"], None, ""),
        (["a?"], "4/4", "a?, shard 4/4"),
    ],
)
def test_text_and_json(patterns, shard, text):
    subset = Subset.parse(patterns, shard)
    assert str(subset) == text
    assert Subset.read(subset.as_json()) == subset
    assert (subset == EVERYTHING) is (text == "")


@pytest.mark.parametrize(
    "shard", ["0/4", "5/4", "1", "1/", "/4", "-1/4", "1/0", "a/b", "1/4/2", "", "1/\u0661", "1/9999999"]
)
def test_bad_shards(shard):
    with pytest.raises(SubscriberError, match="must be like 1/4") as raised:
        Subset.parse([], shard)
    assert repr(shard) in str(raised.value)


@pytest.mark.parametrize("pattern", ["", "x" * 191, "a*b*c*d*"])
def test_bad_patterns(pattern):
    with pytest.raises(SubscriberError, match="must have 1 to 190 characters, and at most 3 stars"):
        Subset.parse([pattern])


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("celery/*", ["celery/", "celery/a/b", "celery/\n"], ["celery", "Celery/a", "xcelery/a"]),
        ("*", ["", "a", "\n"], []),
        ("a?c", ["abc", "a?c", "a\nc", "a🐇c"], ["ac", "abbc", "ABC"]),
        ("a.c", ["a.c"], ["abc"]),
        ("50%_[x]!", ["50%_[x]!"], ["50xx[x]!", "50%_x!"]),
    ],
)
def test_patterns(pattern, matching, others):
    subset = Subset.parse([pattern])
    assert [key for key in [*matching, *others] if key in subset] == matching


@given(key=st.text(max_size=20), parts=st.integers(1, 9))
def test_each_key_is_in_one_shard(key, parts):
    assert sum(key in Subset.parse([], f"{number}/{parts}") for number in range(1, parts + 1)) == 1


# A pattern with many stars is refused.
TEXT = st.text(st.sampled_from("ab*?[]%_!\\'\"A é🐇\n"), min_size=1, max_size=6)


@given(
    keys=st.lists(TEXT, max_size=5),
    patterns=st.lists(TEXT.filter(lambda text: text.count("*") <= 3), max_size=3),
    shard=st.sampled_from([None, "1/2", "2/2", "2/3"]),
)
@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sql_says_the_same(db, keys, patterns, shard):
    subset = Subset.parse(patterns, shard)
    PartitionLease.objects.all().delete()
    PartitionLease.objects.bulk_create(
        PartitionLease(consumer_group="g", topic="t", partition_key=key, leased_at=0) for key in set(keys)
    )
    session = Session(USING)
    sql, parameters = subset.condition(session.dialect, "partition_key")
    table = PartitionLease._meta.db_table
    found = {key for (key,) in session.rows(f"SELECT partition_key FROM {table} WHERE 1 = %s{sql}", (1, *parameters))}
    assert found == {key for key in keys if key in subset}


# -- who works on what --------------------------------------------------------


@MODES
def test_only_its_partitions_are_worked_on(db, mode):
    publish_many("t", (Message(key, key=key) for key in KEYS))
    got = Recorder()
    sub = Sub(handler(mode=mode, function=got), subset=CELERY)
    sub.settle()
    assert sorted(got.payloads) == [key for key in KEYS if key.startswith("celery/")]
    assert lag() == 10
    everything = Recorder()
    Sub(handler(mode=mode, function=everything)).settle()
    assert sorted(everything.payloads) == [key for key in KEYS if key.startswith("kombu/")]
    assert lag() == 0


@MODES
def test_redeliveries_of_others_are_left_to_them(db, clock, mode):
    """Also when they stand at the head of what is due, and nobody is there for them."""
    publish_many("t", (Message(key, key=key) for key in KEYS))
    lost = Sub(handler(mode=mode))
    lost.step()
    for _ in KEYS:
        lost.take()
    clock.advance(61)
    got = Recorder()
    sub = Sub(handler(mode=mode, function=got), subset=CELERY, claim_size=5)
    sub.settle()
    assert sorted(got.payloads) == [key for key in KEYS if key.startswith("celery/")]
    assert lag() == 10


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_shards_make_up_the_whole(db, parts):
    publish_many("t", (Message(n, key=f"k{n % 40}") for n in range(200)))
    got = Recorder()
    subs = [Sub(handler(function=got), subset=Subset.parse([], f"{n}/{parts}")) for n in range(1, parts + 1)]
    for sub in subs:
        sub.settle()
    assert sorted(got.payloads) == list(range(200))
    assert lag() == 0


def test_shares_are_computed_among_those_of_the_same_subset(db):
    publish_many("t", (Message(key, key=key) for key in KEYS))
    celery = [Sub(handler(function=stuck), subset=CELERY) for _ in range(2)]
    kombu = [Sub(handler(function=stuck), subset=Subset.parse(["kombu/*"])) for _ in range(5)]
    rebalance([*celery, *kombu])
    assert [len(sub.owned()) for sub in celery] == [5, 5]
    assert [len(sub.owned()) for sub in kombu] == [2, 2, 2, 2, 2]
    assert all(key in CELERY for sub in celery for key in sub.owned())


def test_leases_are_taken_over_within_the_subset_only(db, clock):
    publish_many("t", (Message(key, key=key) for key in KEYS))
    dead = Sub(handler(function=stuck))
    dead.step()
    assert len(dead.owned()) == 20
    clock.advance(31)
    sub = Sub(handler(function=stuck), subset=CELERY)
    sub.step(times=3)
    assert sub.owned() == {key for key in KEYS if key in CELERY}
    owners = dict(PartitionLease.objects.values_list("partition_key", "leased_by"))
    assert {key for key, owner in owners.items() if owner == dead.name} == {key for key in KEYS if key not in CELERY}


def test_overlapping_subsets_do_not_share_a_partition(db):
    publish_many("t", (Message(key, key=key) for key in KEYS))
    subs = [Sub(handler(function=stuck)), Sub(handler(function=stuck), subset=CELERY)]
    rebalance(subs)
    first, second = (sub.owned() for sub in subs)
    assert not first & second
    assert first | second == set(KEYS)


@pytest.mark.parametrize("order", [0, 1])
def test_a_share_is_of_what_equals_have(db, order):
    """What a subscriber of another, overlapping subset holds is not shared out among those of this one."""
    publish_many("t", (Message(key, key=key) for key in KEYS))
    part = Sub(handler(function=stuck), subset=CELERY)
    rebalance([part])
    assert len(part.owned()) == 10
    full = [Sub(handler(function=stuck)) for _ in range(2)]
    rebalance(full if order else full[::-1], rounds=6)
    assert sorted(len(sub.owned()) for sub in full) == [5, 5]


# -- what people see ----------------------------------------------------------


def test_status_tells_of_partitions_that_nobody_takes(db, clock, capsys):
    publish_many("t", (Message(key, key=key) for key in KEYS))
    first = Sub(handler(), subset=CELERY).step()
    clock.advance(61)
    for sub in (first,):
        sub.heart.beat()
    call_command("queuestatus")
    assert "No live subscriber of g/t claims partition 'kombu/" in capsys.readouterr().out
    second = Sub(handler(), subset=Subset.parse(["kombu/*"])).step()
    clock.advance(1)
    for sub in (first, second):
        sub.heart.beat()
    call_command("queuestatus", "--format", "json")
    (group,) = (found := json.loads(capsys.readouterr().out))["groups"]
    assert sorted(group["subsets"].values()) == ["celery/*", "kombu/*"]
    assert "unserved" not in {one["kind"] for one in found["problems"]}


@pytest.mark.parametrize(
    ("options", "text"), [({"shard": "5/4"}, "shard '5/4'"), ({"partition": [""]}, "partition ''")]
)
def test_bad_options_are_refused(db, options, text):
    with pytest.raises(CommandError, match=text):
        call_command("runsubscriber", **options)
