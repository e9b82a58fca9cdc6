"""The page Offsets: each group's state in each partition, filters, the furthest behind, the heat map."""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.inspection import Bounds
from django_mysqlqueue.models import PartitionLease
from tests.support.dashboard import ROOT, confirm, page
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, groups

PAGE = f"{ROOT}offsets/"
G = {"group": "g", "topic": "t"}


def log(numbers, topic="t"):
    """A number of messages for each key."""
    publish_many(topic, (Message(n, key=key) for key, number in numbers.items() for n in range(number)))
    sequence()


def register(*refs, mode="ordered"):
    for ref in refs:
        groups.register(USING, GroupRef(*ref), mode=mode, start="earliest")


def keys(answer):
    return [row.key for row in answer.context["rows"]]


def table(text):
    """The cells of the rows of the table."""
    rows = re.findall(r"<tr>(.*?)</tr>", text[text.index("<tbody>", text.index('id="mq-offsets"')) :], re.DOTALL)
    return [
        [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows
    ]


def cells(text):
    """The titles of the heat map's cells with their levels, and the links of those that have one."""
    picture = text[text.index('<svg class="mq-heat"') :]
    picture = picture[: picture.index("</svg>")]
    titles = re.findall(r'<title>([^<]*)</title><rect class="mq-cell mq-cell-(\d)"', picture)
    links = re.findall(r'<a href="([^"]*)" aria-label="([^"]*)">', picture)
    return [(unescape(title), int(level)) for title, level in titles], {unescape(b): unescape(a) for a, b in links}


def test_what_it_shows_of_a_partition(client):
    sub = Sub(handler(function=lambda one: one.payload < 1 or one.nack(delay=3600)))
    log({"a": 3, "b": 1})
    sub.step()
    sub.work()
    sub.flush()
    answer = client.get(PAGE, G)
    (a, b) = table(answer.content.decode())
    one = answer.context["rows"][0]
    assert one.watermark < one.position == one.end
    assert a[1:6] == ["a", str(one.watermark), str(one.position), str(one.end), "2"]
    assert a[6] == str(one.head.offset)
    assert a[7]
    assert re.fullmatch(rf"{sub.name}\d+ ms ago \d{{4}}-.*", a[8])
    assert re.match("1 next in ", a[9])
    assert b[5:8] == ["0", "-", "-"]
    whole = table(client.get(PAGE).content.decode())
    assert whole[0][:7] == a[:7], "there is one group: it is chosen"


def test_without_a_choice_it_lists_all_groups_and_leads_to_each(client):
    register(("g", "t"), ("h", "t"), ("g", "u"))
    for topic in "tu":
        log({"a": 1, "b": 2}, topic)
    answer = client.get(PAGE)
    text = answer.content.decode()
    assert [row[:2] for row in table(text)] == [
        ["".join(ref), key] for ref in (("g", "t"), ("g", "u"), ("h", "t")) for key in "ab"
    ]
    assert "mq-heat" not in text
    assert "Choose a group and a topic" in text
    assert "mq-all" not in text
    link = unescape(re.search(r'<a href="([^"]*offsets[^"]*)"><bdi>g</bdi></a><br><bdi>u', text).group(1))
    shown = client.get(link)
    assert shown.context["one"].ref == ("g", "u")
    assert '<svg class="mq-heat"' in shown.content.decode()


def test_filters_by_group_topic_key_and_owner(client):
    sub = Sub(handler("t", "g"), handler("u", "g"), handler("t", "h"))
    for topic in "tu":
        log({"a": 1, "ab": 1, "b": 1}, topic)
    sub.step()
    PartitionLease.objects.filter(partition_key="ab").update(leased_by="")
    PartitionLease.objects.filter(partition_key="b", topic="u").update(leased_by="lost")

    def places(**query):
        return [(*row.ref, row.key) for row in client.get(PAGE, query).context["rows"]]

    assert len(places()) == 9
    assert places(group="h") == [("h", "t", "a"), ("h", "t", "ab"), ("h", "t", "b")]
    assert places(topic="u", prefix="a") == [("g", "u", "a"), ("g", "u", "ab")]
    assert places(owner=sub.name, group="g") == [("g", "t", "a"), ("g", "t", "b"), ("g", "u", "a")]
    assert places(unowned="1") == [("g", "t", "ab"), ("g", "u", "ab"), ("h", "t", "ab")]
    assert places(owner="lost") == [("g", "u", "b")]
    assert "No partitions match." in page(client, "offsets", owner="nobody")
    assert "No partitions match." in page(client, "offsets", group="nobody")
    text = page(client, "offsets", owner="lost", prefix="b", group="g", topic="u")
    assert '<span class="mq-tag mq-bad">lost</span>' in text
    for field in ('<option value="g" selected>', '<option value="u" selected>', 'value="b"', 'value="lost"'):
        assert field in text
    titles, _links = cells(text)
    assert titles == [("b: 1 message", 1)], "the heat map has the same filters"


def test_pages_keep_the_filters(client, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.offsets.PAGE_ROWS", 2)
    register(("g", "t"), ("g", "u"))
    for topic in "tu":
        log({"a1": 1, "a2": 1, "a3": 1, "b": 1}, topic)
    seen, link = [], f"{PAGE}?prefix=a&group=g"
    while link:
        answer = client.get(unescape(link))
        seen += [(row.ref.topic, row.key) for row in answer.context["rows"]]
        (link,) = re.findall(r'href="([^"]*)">Next page', answer.content.decode()) or [None]
    assert seen == [(topic, key) for topic in "tu" for key in ("a1", "a2", "a3")]
    (first,) = re.findall(r'href="([^"]*)">First page', answer.content.decode())
    assert unescape(first) == f"{PAGE}?prefix=a&group=g"


@pytest.mark.parametrize(
    "after", ["x", "[1, 2, 3]", '["g"]', '["g", "t", 5]', "5", "[" * 9999, '["g", "t", "\\ud800"]']
)
def test_a_position_that_is_none(client, after):
    assert "is not a position in the list" in page(client, "offsets", 400, after=after)


def test_furthest_behind_says_among_which(client, monkeypatch):
    register(("g", "t"))
    log({"a": 2, "b": 12, "c": 0, "d": 3, "e": 1})
    answer = client.get(PAGE, {**G, "order": "behind"})
    assert keys(answer) == ["b", "d", "a", "e"]
    assert answer.context["order_text"] == "furthest behind among the 4 partitions with messages in the log"
    assert answer.context["order_text"] in answer.content.decode()
    assert client.get(PAGE, G).context["order_text"] == "by key"
    monkeypatch.setattr("tests.support.internals.log.NEWEST", 1)
    monkeypatch.setattr("django_mysqlqueue.admin.pages.offsets.OffsetsPage.bounds", Bounds(surveyed_partitions=1))
    answer = client.get(PAGE, {**G, "order": "behind"})
    assert keys(answer) == ["a", "e"], "e is new"
    assert answer.context["order_text"] == "furthest behind among the 2 partitions that were looked at, not of all"
    bounds = Bounds(seconds=0.0, piece=1, surveyed_partitions=9)
    monkeypatch.setattr("django_mysqlqueue.admin.pages.offsets.OffsetsPage.bounds", bounds)
    answer = client.get(PAGE, {**G, "order": "behind"})
    assert keys(answer) == ["a"]
    assert answer.context["order_text"].endswith("; 3 of them were not counted in time")
    assert [level for _, level in cells(answer.content.decode())[0]] == [1, 5, 5, 5]
    assert "not counted in time: 3</bdi>" in answer.content.decode()


def test_the_heat_map_has_a_cell_for_each_partition_which_leads_there(client):
    register(("g", "t"))
    log({"a": 1, "b": 10, "c": 100, "d": 1000, "e": 2})
    Sub(handler("u", "h"))
    text = client.get(PAGE, G).content.decode()
    titles, links = cells(text)
    assert titles == [
        ("a: 1 message", 1),
        ("b: 10 messages", 2),
        ("c: 100 messages", 3),
        ("d: 1,000 messages", 4),
        ("e: 2 messages", 1),
    ]
    assert keys(client.get(links["c: 100 messages"])) == ["c"]
    assert "1 to 9 messages: 2</bdi>" in text
    assert "no backlog" not in text
    Sub(handler()).settle(rounds=30)
    titles, links = cells(client.get(PAGE, G).content.decode())
    assert titles[0] == ("a: 0 messages", 0)
    assert not links


def test_a_cell_stands_for_a_range_where_there_are_many(client, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.offsets.CELLS", 3)
    register(("g", "t"))
    log({"a": 4, "b": 5, "c": 6, "d": 7, "e": 8})
    text = client.get(PAGE, G).content.decode()
    titles, links = cells(text)
    assert titles == [("a … b: 9 messages", 1), ("c … d: 13 messages", 2), ("e: 8 messages", 1)]
    assert "each square is a range of 2 partitions" in text
    assert [keys(client.get(link)) for link in links.values()] == [["a", "b", "c", "d", "e"], ["c", "d", "e"], ["e"]]


def test_names_that_would_mislead_are_escaped(client):
    register(("g", "t"))
    publish("t", 1, key="a\u202eb")
    publish("t", 1, key="k", priority=10)
    sequence()
    text = client.get(PAGE, G).content.decode()
    assert "\u202e" not in text.replace(f'value="{"a"}\u202eb"', "")
    assert "a\\u202eb" in text
    titles, links = cells(text)
    assert [title for title, _ in titles] == ["k (priority 10): 1 message", "a\\u202eb: 1 message"]
    assert [keys(client.get(link)) for link in links.values()] == [["__p:+010:k"], ["a\u202eb"]]


def test_a_shared_group_has_no_owners(client):
    Sub(handler(mode="shared"))
    log({"a": 1})
    text = client.get(PAGE, G).content.decode()
    assert "partitions have no owner" in text
    for offered in ('name="row"', "mq-all", "do/release"):
        assert offered not in text
        assert offered not in client.get(f"{ROOT}group/", {"group": "g", "topic": "t"}).content.decode()
    refused = client.get(f"{ROOT}do/release/", {**G, "row": '"a"'}).content.decode()
    assert "is shared: its subscribers hold no leases" in refused
    assert 'name="confirmed"' not in refused


def test_leases_are_released_from_it(client):
    sub = Sub(handler())
    log({"a": 1, "b": 1})
    sub.step()
    text = client.get(PAGE, G).content.decode()
    assert re.findall(r'name="row" value="([^"]*)"', text) == ["&quot;a&quot;", "&quot;b&quot;"]
    confirm(client, "release", **G, row=['"a"'])
    assert [row.owner for row in client.get(PAGE, G).context["rows"]] == ["", sub.name]
    assert keys(client.get(PAGE, {**G, "unowned": "1"})) == ["a"]


@pytest.mark.promise("Cost")
def test_more_partitions_are_no_more_statements(client, monkeypatch):
    bounds = Bounds(surveyed_partitions=100, seconds=60.0)
    monkeypatch.setattr("django_mysqlqueue.admin.pages.offsets.OffsetsPage.bounds", bounds)
    register(("g", "t"), ("h", "u"))
    queries = [G, {**G, "order": "behind"}, {**G, "prefix": "1"}, {**G, "owner": "host"}]

    def costs():
        found = []
        for query in queries:
            with CaptureQueriesContext(connection) as captured:
                client.get(PAGE, query)
            found.append(len(captured))
        return found

    log({f"{number:04}": 1 for number in range(300)})
    few = costs()
    log({f"{number:04}": 1 for number in range(300, 2000)})
    log({f"x{number:04}": 1 for number in range(2000)}, "other")  # so none of t is among the newest
    assert max(costs()) <= max(few)
    backlogs = client.get(PAGE, G).context["heat_map"]
    assert sum(level.cells for level in backlogs.levels) == 100
