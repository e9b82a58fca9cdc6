"""The dashboard's list of messages."""

from __future__ import annotations

import datetime
import json
import re
from html import unescape
from urllib.parse import parse_qs

import pytest
from django.utils import timezone

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.keys import lane
from django_mysqlqueue.operations import redriving
from tests.support.dashboard import ROOT, page, submitted
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import DeadLetterFilter
from tests.support.scenarios import dead_letters, log, offsets_of

pytestmark = pytest.mark.any_engine


def listed(client, **query):
    """The offsets on a page of the list, and the answer."""
    answer = client.get(f"{ROOT}messages/", query)
    assert answer.status_code == 200, answer.content.decode()
    return [row.entry.offset for row in answer.context["rows"]], answer


def link(answer, text):
    """The query of a link on a page; None: there is no such link."""
    found = re.search(rf'href="[^"?]*\??([^"]*)">{text}</a>', answer.content.decode())
    return None if found is None else {name: one for name, (one,) in parse_qs(unescape(found[1])).items()}


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.messages.PAGE_ROWS", 3)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("query", "merged"),
    [({}, 50), ({"topic": "t"}, 50), ({"topic": "t"}, 2), ({"topic": "t", "key": "b"}, 50), ({"topic": "u"}, 2)],
)
def test_all_that_is_asked_for_newest_first_in_pages_there_and_back(client, monkeypatch, query, merged):
    monkeypatch.setattr(Page, "bounds", Bounds(merged_partitions=merged, walked=4))
    for number in range(36):
        publish("tu"[number % 2], number, key="abc"[number % 3])
        sequence()
    wanted = QueueMessage.objects.filter(topic__in=query.get("topic", "tu"), partition_key__in=query.get("key", "abc"))
    wanted = sorted(wanted.values_list("offset", flat=True), reverse=True)
    down, pages = [], []
    given = dict(query)
    while given is not None:
        found, answer = listed(client, **given)
        down += found
        pages.append(given)
        given = link(answer, "Older") or link(answer, "Continue search: older")
    assert down == wanted
    assert len(pages) > 1
    up, last = [], found
    while (given := link(answer, "Newer") or link(answer, "Continue search: newer")) is not None:
        found, answer = listed(client, **given)
        up = found + up
        assert len(up) <= len(wanted)
    assert up == wanted[: len(wanted) - len(last)]
    assert listed(client, **link(answer, "Newest"))[0] == listed(client, **query)[0]


def test_a_walk_says_what_it_has_looked_at(client, monkeypatch):
    monkeypatch.setattr(Page, "bounds", Bounds(merged_partitions=1, walked=5))
    rare = log(2, topic="rare")
    offsets = log(12)
    found, answer = listed(client, topic="rare")
    assert found == []
    assert f"only offsets {offsets[-5]} to {offsets[-1]} were searched" in answer.content.decode()
    while not found:
        found, answer = listed(client, **link(answer, "Continue search: older"))
    assert found == rare[::-1]
    assert link(answer, "Continue search: older") is None


def test_from_an_offset_and_from_a_time_on(client):
    offsets = log(6, "a")
    base = 1_700_000_000_000
    for number, offset in enumerate(offsets):
        QueueMessage.objects.filter(offset=offset).update(published_at=base + number * 1000)
    assert listed(client, offset=offsets[2])[0] == offsets[2::-1]
    assert listed(client, offset=offsets[2], topic="t", key="a")[0] == offsets[2::-1]
    assert listed(client, offset=2**63 - 1)[0] == offsets[::-1]
    at = timezone.make_naive(datetime.datetime.fromtimestamp(base / 1000 + 3, datetime.UTC))
    assert listed(client, time=at.isoformat())[0] == offsets[3::-1]
    assert listed(client, time=at.isoformat(), offset=offsets[1])[0] == offsets[1::-1]
    newer = link(listed(client, offset=offsets[2])[1], "Newer")
    assert listed(client, **newer)[0] == offsets[:2:-1]
    assert listed(client, time="1980-01-01T00:00:00")[0] == []


def test_the_partition_whose_key_is_empty(client):
    publish("t", 1, key="")
    publish("t", 2, key="b")
    sequence()
    first, second = offsets_of()
    assert listed(client, topic="t", key="", keyed=1)[0] == [first]
    assert listed(client, topic="t", key="b")[0] == [second]
    assert listed(client, topic="t", key="")[0] == [second, first]


@pytest.mark.parametrize("query", [{"key": "a"}, {"keyed": "1"}, {"key": "a", "id": "x"}])
def test_a_partition_without_a_topic_is_asked_for_it(client, query):
    publish("t", 1, key="a")
    sequence()
    text = page(client, "messages", **query)
    assert "Enter the topic of the partition, too." in text
    assert f'name="key" value="{query.get("key", "")}"' in text
    assert "No messages were searched." in text
    assert not listed(client, **query)[0]
    assert listed(client, **query, topic="t")[0] == (offsets_of() if query == {"key": "a"} else [])


@pytest.mark.parametrize(
    ("exact", "meant"),
    [
        (json.dumps("a\nb"), "a\nb"),
        (json.dumps("a\nc"), "a\\u000ab"),
        ("7", "a\\u000ab"),
        ('"\\ud800"', "a\\u000ab"),
        ("[" * 20_000, "a\\u000ab"),
        (None, "a\\u000ab"),
    ],
)
def test_what_an_input_shows_escaped_is_sent_beside_it(client, exact, meant):
    for key in ("a\nb", "a\\u000ab"):
        publish("t", key, key=key)
    sequence()
    query = {"topic": "t", "key": "a\\u000ab", **({} if exact is None else {"exact_key": exact})}
    (row,) = client.get(f"{ROOT}messages/", query).context["rows"]
    assert row.entry.key == meant


def test_a_topic_with_characters_that_inputs_lose_can_be_found(client):
    wanted, *_ = log(3)
    QueueMessage.objects.filter(offset=wanted).update(topic="a\nb")
    QueueMessage.objects.filter(topic="t").update(topic="ab")
    form = submitted(client.get(f"{ROOT}messages/", {"topic": "a\nb"}).content.decode())
    assert listed(client, **form)[0] == [wanted]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"offset": "x"}, "offset='x': must be an integer"),
        ({"before": "-1"}, "before='-1': must be an integer"),
        ({"topic": "t", "key": "a", "priority": "101"}, "priority 101: must be an integer from -100 to 100"),
        ({"topic": "t", "key": "a", "priority": "-101"}, "priority='-101': must be an integer"),
        ({"topic": "t", "key": "k" * 190, "priority": "1"}, "with a priority at most 181 are allowed"),
        ({"time": "yesterday"}, "time='yesterday' is not a valid date and time"),
        ({"time": "2026-13-40T00:00:00"}, "is not a valid date and time"),
    ],
)
def test_a_query_that_makes_no_sense_is_told_so(client, query, says):
    assert says in page(client, "messages", 400, **query)


def test_by_id(client, settings):
    publish("t", 1, key="a", id="order-7")
    publish("t", 2, key="b", id="order-7")
    publish("u", 3, key="a", id="order-7")
    keyless = publish("t", 4)
    sequence()
    one, two = QueueMessage.objects.filter(topic="t", message_id="order-7").values_list("offset", flat=True)
    three = offsets_of("u")[0]
    assert listed(client, topic="t", key="a", id="order-7")[0] == [one]
    # Also where nobody has ever worked.
    assert listed(client, topic="t", id="order-7")[0] == [two, one]
    found, answer = listed(client, topic="t", id="order-8")
    assert found == []
    assert "All partitions were searched." in answer.content.decode()
    assert "see Scheduled" in answer.content.decode()
    by_place = listed(client, topic="t", id=keyless)
    assert by_place[0] == [QueueMessage.objects.get(message_id=keyless).offset]
    sub = Sub(handler("t", "g"), handler("t", "h"), handler("u", "g"))
    sub.settle()
    assert listed(client, topic="t", id="order-7")[0] == [two, one]
    assert listed(client, id="order-7")[0] == [three, two, one]
    assert listed(client, topic="u", id="nothing")[0] == []


def test_an_id_of_its_own_time_is_found_where_nobody_knows_the_partition(client):
    message_id = new_message_id()
    log(3)
    publish("t", 1, key="somewhere", id=message_id)
    sequence()
    log(3)
    offset = QueueMessage.objects.get(message_id=message_id).offset
    assert listed(client, topic="t", id=message_id)[0] == [offset]
    assert listed(client, id=message_id)[0] == [offset]
    assert listed(client, topic="other", id=message_id)[0] == []
    text = listed(client, id=new_message_id())[1].content.decode()
    assert "of that time were searched" in text


def test_the_search_for_an_id_says_where_it_stopped(client, monkeypatch):
    monkeypatch.setattr(Page, "bounds", Bounds(searched_partitions=2))
    keys = "abcd"
    publish_many("t", (Message(1, key=key, id="x" + key) for key in keys))
    sequence()
    Sub(handler("t", "g")).settle()
    assert len(listed(client, topic="t", id="xb")[0]) == 1
    found, answer = listed(client, topic="t", id="xd")
    assert found == []
    assert "Only 2 partitions were searched" in answer.content.decode()


def test_marks_of_dead_letters_and_redriven_ones(client):
    letters = dead_letters(2, keys="a")
    text = page(client, "messages", topic="t_dlq")
    assert text.count("dead letter of g") == 2
    letter = QueueMessage.objects.get(offset=letters[0])
    assert listed(client, topic="t_dlq", id=letter.message_id)[0] == [letters[0]]
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq", offsets=(letters[0],)), actor="ada")
    sequence()
    text = page(client, "messages", topic="t")
    assert "redriven" in text
    assert "only for g" in text


def test_the_partition_of_a_key_and_priority(client):
    publish("t", 1, key="a")
    publish("t", 2, key="a", priority=10)
    sequence()
    low, high = offsets_of("t")
    assert listed(client, topic="t", key="a")[0] == [low]
    found, answer = listed(client, topic="t", key="a", priority=10)
    assert found == [high]
    assert "<code><bdi>a (priority 10)</bdi></code>" in answer.content.decode()
    assert listed(client, topic="t", key="a", priority=0)[0] == [low]
    assert listed(client, topic="t", key=lane("a", 10))[0] == [high]
