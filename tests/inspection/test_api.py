"""The public API for reading: its defaults, what each function returns, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.db import OperationalError

from django_mysqlqueue import inspection, publish
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.inspection import (
    Bounds,
    Count,
    HealthLimits,
    check_health,
    find_problems,
    get_message,
    get_overview,
    list_dead_letters,
    list_messages,
    list_scheduled,
)
from django_mysqlqueue.models import ConsumerGroup, QueueMessage, SubscriberHeartbeat
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.inspected import group_of, groups_of
from tests.support.internals import GroupRef, groups
from tests.support.scenarios import dead_letters, offsets_of

pytestmark = pytest.mark.usefixtures("db")

NAMES = [name for name in inspection.__all__ if name.startswith(("get_", "list_", "find_", "check_"))]


def register(*refs):
    for group, topic in refs:
        groups.register(USING, GroupRef(group, topic), mode="ordered", start="earliest")


@pytest.mark.any_engine
def test_names_are_loaded_on_first_use_and_need_no_settings():
    code = "import sys; from django_mysqlqueue import inspection; dir(inspection); sys.exit('django' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert set(inspection.__all__) <= set(dir(inspection))
    for name in inspection.__all__:
        assert getattr(inspection, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'get_nothing'"):
        getattr(inspection, "get_nothing")  # noqa: B009


@pytest.mark.any_engine
@pytest.mark.parametrize("name", NAMES)
def test_a_database_that_does_not_exist_is_refused(name):
    given = {"get_message": ("t", "x"), "list_dead_letters": ("t",), "get_job": ("x",)}
    arguments = given.get(name, ())
    with pytest.raises(InvalidMessage, match="there is no such database"):
        getattr(inspection, name)(*arguments, using="nowhere")


@pytest.mark.any_engine
def test_the_database_of_the_setting_is_read_by_default(settings):
    settings.MYSQLQUEUE = {"DATABASE": USING}
    assert get_overview().using == USING
    settings.MYSQLQUEUE = {"DATABASE": "nowhere"}
    with pytest.raises(Exception, match="nowhere"):
        get_overview()


@pytest.mark.any_engine
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("get_", "list_"))])
def test_the_database_of_a_topic_is_read_by_default(settings, name):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"DATABASE": "other"}}}  # It has no tables.
    given = {"get_message": {"message_id": "x"}, "get_job": {"job_id": "x"}}
    arguments = given.get(name, {})
    for topic in ("u", "u_dlq"):
        getattr(inspection, name)(topic=topic, **arguments)
    for topic in ("t", "t_dlq"):
        with pytest.raises(OperationalError, match="no such table"):
            getattr(inspection, name)(topic=topic, **arguments)


def test_overviews_of_some_groups():
    register(("a", "t"), ("b", "t"), ("a", "u"))
    publish("t", 1)
    sequence()
    assert [one.ref for one in groups_of()] == [("a", "t"), ("b", "t"), ("a", "u")]
    assert [one.ref for one in groups_of(topic="t")] == [("a", "t"), ("b", "t")]
    assert [one.ref for one in get_overview(group="a").groups] == [("a", "t"), ("a", "u")]
    assert (get_overview().topics, get_overview(group="a").topics) == (("t",), None)
    whole = {one.ref: one for one in groups_of()}
    assert group_of("a", "t") == whole["a", "t"]
    assert group_of("a", "t").lag == Count(1)
    assert group_of("c", "t") is None


def test_an_overview_of_some_groups_counts_their_dead_letters_alone():
    dead_letters(2, keys="a")
    dead_letters(1, keys="a", topic="u")
    assert get_overview().dead_letters == Count(3)
    assert get_overview(topic="u").dead_letters == Count(1)


def test_lease_duration_and_thresholds_come_from_the_settings(settings):
    settings.MYSQLQUEUE = {"LEASE_DURATION": 20, "LEASE_RENEWAL_INTERVAL": 5, "HEALTH": {"WINDOW": 120}}
    Sub(handler())
    overview = get_overview()
    assert overview.window == 120
    SubscriberHeartbeat.objects.update(heartbeat_at=overview.now - 25_000)
    assert not group_of("g", "t").live
    assert get_overview(lease_duration=60).groups[0].live
    settings.MYSQLQUEUE = {}
    assert group_of("g", "t").live


def test_find_problems_reads_the_overview_that_it_needs(clock):
    clock.stop()
    register(("g", "t"))
    publish("t", 1)
    sequence()
    clock.advance(100)
    found = find_problems()
    assert [(one.kind, one.severity, one.ref) for one in found] == [("no_subscriber", 0, ("g", "t"))]
    assert [one.text for one in find_problems(get_overview())] == [one.text for one in found]


def test_check_health_has_limits_and_filters(clock):
    register(("g", "t"))
    publish("t", 1)
    sequence()
    Sub(handler())
    assert check_health().healthy
    report = check_health(HealthLimits(lag=0), groups=["g"])
    assert [(one.kind, one.ref) for one in report.findings] == [("lag", ("g", "t"))]


def test_get_message_tells_its_whole_history():
    def fails_once(delivery):
        if delivery.attempt == 1:
            raise ValueError("no")

    message_id = publish("t", {"n": 1}, key="k", metadata={"m": 2})
    assert get_message("t", message_id) is None, "it is in the outbox"
    Sub(handler(function=fails_once)).settle()
    register(("h", "t"))
    found = get_message("t", message_id)
    assert found == get_message("t", message_id, key="k")
    assert (found.content.entry.message_id, found.content.entry.key) == (message_id, "k")
    assert (found.content.payload, found.content.metadata["m"]) == (b'{"n":1}', 2)
    assert [(one.ref.group, one.standing) for one in found.groups] == [("g", "settled"), ("h", "unclaimed")]
    assert [(one.outcome, one.attempt) for one in found.deliveries] == [("failed", 1)]
    assert not found.more_deliveries
    assert get_message("t", message_id, key="other") is None
    assert get_message("u", message_id) is None


def test_get_message_reads_the_newest_of_an_id():
    for key in "ab":
        publish("t", key, key=key, id="x")
        sequence()
    assert get_message("t", "x").content.entry.key == "b"
    assert get_message("t", "x", key="a").content.entry.key == "a"


def test_list_dead_letters_by_topic_group_error_and_page():
    dead = dead_letters(3, keys="a")
    found = list_dead_letters("t")
    assert [one.offset for one in found.dead_letters] == dead[::-1]
    assert found == list_dead_letters("t_dlq")
    assert found.count == Count(3)
    assert found.dead_letters[0].ref == ("g", "t")
    page = list_dead_letters("t", limit=2)
    assert [one.offset for one in page.dead_letters] == dead[:0:-1]
    assert [one.offset for one in list_dead_letters("t", before=dead[1]).dead_letters] == dead[:1]
    assert list_dead_letters("t", group="other").count == Count(0)
    assert list_dead_letters("t", error="no such text").count == Count(0)
    assert list_dead_letters("t", until=found.dead_letters[0].failed_at - 10**6).count == Count(0)
    assert list_dead_letters("t", bounds=Bounds(dead_letters=2)).count == Count(2, exact=False)


def test_list_dead_letters_of_a_key_reads_only_its_partitions():
    dead_letters(4, keys="ab")
    publish("t", 9, key="b", priority=3)
    Sub(handler(function=fail, max_attempts=1)).settle()
    sequence()
    found = list_dead_letters("t", key="b")
    assert (len(found.dead_letters), found.count) == (3, Count(3))
    # Those of the key a are before it.
    for most, count in ((3, Count(3)), (2, Count(2, exact=False)), (1, Count(1, exact=False))):
        assert list_dead_letters("t", key="b", bounds=Bounds(dead_letters=most)).count == count
    assert list_dead_letters("t", key="b", error="no 3").count == Count(1)
    assert list_dead_letters("t", key="c").count == Count(0)


def test_list_messages_and_list_scheduled_come_in_pages():
    for number in range(3):
        publish("t", number, key="a")
        publish("t", number, delay=3600 + number)
    sequence()
    offsets = offsets_of("t")
    first = list_messages(topic="t", limit=2)
    assert [one.offset for one in first.entries] == offsets[:0:-1]
    assert [one.offset for one in list_messages(topic="t", before=first.older).entries] == offsets[:1]
    assert list_messages(topic="t", key="b").entries == []
    waiting = list_scheduled(limit=2)
    assert len(waiting.rows) == 2
    rest = list_scheduled(after=waiting.after)
    assert len(rest.rows) == 1
    assert rest.after is None
    assert list_scheduled(topic="u").rows == ()


def test_get_message_evaluates_the_filters_of_groups():
    policy = parse({"region": ["eu"]})
    Sub(handler(filter=policy), handler(group="h"), handler(group="i"))
    ids = [publish("t", n, key="k", metadata={"region": region}) for n, region in enumerate(["us", "eu"])]
    sequence()
    ConsumerGroup.objects.filter(consumer_group="i").update(filter={"region": [{"sounds-like": "eu"}]})
    for one, matches in zip(ids, (False, True), strict=True):
        g, h, i = get_message("t", one).groups
        assert (g.filter, g.matches) == (policy, matches)
        assert (h.filter, h.matches) == (None, None)
        assert "sounds-like" in i.filter
        assert i.matches is None
    QueueMessage.objects.update(target_group="g")
    g, h, _ = get_message("t", ids[0]).groups
    assert (g.filter, g.matches, h.standing) == (policy, None, "elsewhere")
