"""Contents of messages on the dashboard: in lists, searched, copied, and changed by an edit."""

from __future__ import annotations

import functools
import json
import re
from html import unescape

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.admin import diffs
from django_mysqlqueue.admin.pages.messages import READ_BYTES
from django_mysqlqueue.inspection import log_entries
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import QueueMessage
from tests.support.dashboard import HOSTILE, ROOT, page
from tests.support.dead_letter_pages import ask, bound, fail_with
from tests.support.harness import USING, sequence
from tests.support.internals import Session
from tests.support.topic_permissions import OnTopics

ADDRESS = f"{ROOT}messages/"


def put(*payloads, topic="t", key="k", **options):
    """Puts messages into the log; returns their offsets."""
    publish_many(topic, [Message(payload, key=key, **options) for payload in payloads])
    sequence()
    found = QueueMessage.objects.filter(topic=topic).order_by("-offset").values_list("offset", flat=True)
    return sorted(found[: len(payloads)])


def listed(client, **query):
    """The offsets of the page's rows, and its sentence."""
    answer = client.get(ADDRESS, query)
    assert answer.status_code == 200, answer.content.decode()
    return [row.entry.offset for row in answer.context["rows"]], answer.context["said"]


def star(text, *, topic, kind):
    return text.replace("ada@example.com", "*")


REDACT = {"REDACT": "tests.admin.test_contents.star"}


# -- the column ---------------------------------------------------------------


def test_the_beginnings_of_payloads_are_listed(client):
    put({"n": 1, "name": "ä"}, b"\xff\x00raw", "x" * 5000, HOSTILE)
    rows = client.get(ADDRESS, {"topic": "t"}).context["rows"]
    assert [row.payload for row in rows][1:] == [f'"{"x" * 118}…', "\\xff\x00raw", '{ "n": 1, "name": "ä" }']
    text = client.get(ADDRESS).content.decode()
    assert "<script>alert" not in text
    assert r"\xff\u0000raw" in text
    assert "x" * 119 not in text


def test_only_the_first_bytes_are_read(client):
    put("x" * 100_000, "y" * 100_000)
    with CaptureQueriesContext(connection) as captured:
        client.get(ADDRESS, {"topic": "t"})
    reads = [one["sql"] for one in captured if "payload" in one["sql"]]
    assert len(reads) == 1
    assert "SUBSTR(m.payload, 1, 2000)" in reads[0]
    found = log_entries.beginnings(Session(USING), put("z" * 5000), 10)
    assert [one.payload for one in found.values()] == [b'"zzzzzzzzz']


def test_the_column_is_redacted(client, settings):
    put({"to": "ada@example.com"}, "x" * READ_BYTES + "ada@example.com")
    settings.MYSQLQUEUE = REDACT
    rows = client.get(ADDRESS, {"topic": "t"}).context["rows"]
    assert [row.payload for row in rows] == ["(too long to redact)", '{ "to": "*" }']


@pytest.mark.promise("Permissions by topic")
def test_payloads_are_listed_with_the_permission_on_their_topic(make_client, settings):
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()
    put("mine")
    put("secret", topic="u")
    client = make_client("view_dashboard")
    assert "mine" not in page(client, "messages")
    OnTopics.granted.add((User.objects.latest("pk").username, "django_mysqlqueue.see_payloads", "t"))
    for query in ({}, {"topic": "t"}, {"topic": "u"}):
        text = page(client, "messages", **query)
        assert ("&quot;mine&quot;" in text or '"mine"' in text) is (query != {"topic": "u"})
        assert "secret" not in text


# -- the search ---------------------------------------------------------------


def test_a_search_in_payloads_and_metadata(client):
    offsets = put({"city": "Köln"}, b"raw K\xc3\xb6ln", {"city": "Bonn"}, metadata={"shop": "north"})
    other = put({"city": "Köln"}, key="other")
    put({"city": "Köln"}, topic="u")
    assert listed(client, topic="t", contains="Köln")[0] == [*other, *offsets[1::-1]]
    assert listed(client, topic="t", contains="köln")[0] == []
    assert listed(client, topic="t", contains="north")[0] == offsets[::-1]
    assert listed(client, topic="t", contains="Köln", key="other")[0] == other
    assert listed(client, topic="t", contains="Köln", offset=offsets[0])[0] == offsets[:1]
    found, said = listed(client, topic="t", contains="%_")
    size = sum(QueueMessage.objects.filter(topic="t").values_list("size", flat=True))
    assert found == []
    numbers = f"4 messages with {size} bytes of payloads, offsets {offsets[0]} to {other[0]}"
    assert said == f"Searched: {numbers}. There are no older ones."
    assert listed(client, topic="none", contains="x") == ([], "")


@pytest.mark.parametrize(
    "bounds",
    [{"contents": 2}, {"content_bytes": 1}, {"content_seconds": 0.0}, {"merged_partitions": 1, "walked": 3}],
    ids=str,
)
def test_a_search_is_bounded_and_can_be_continued(client, monkeypatch, bounds):
    monkeypatch.setattr(log_entries, "CHUNK_ROWS", 2)
    offsets = put("needle", *range(6), "needle") + put(*range(3), key="other")
    bound(monkeypatch, **bounds)
    address, found, pages = f"{ADDRESS}?topic=t&contains=needle", [], 0
    while address:
        answer = client.get(address)
        found += [row.entry.offset for row in answer.context["rows"]]
        pages += 1
        links = re.findall(r'href="([^"]*)">Continue search: older', answer.content.decode())
        address = unescape(links[0]) if links else ""
    assert found == [offsets[7], offsets[0]]
    assert pages > 2


def test_a_page_of_matches_continues_behind_the_last_one(client, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.messages.PAGE_ROWS", 2)
    offsets = put(*["needle"] * 5)
    found, said = listed(client, topic="t", contains="needle")
    assert found == offsets[:2:-1]
    assert f"offsets {offsets[3]} to {offsets[4]}" in said
    assert listed(client, topic="t", contains="needle", before=offsets[3])[0] == offsets[2:0:-1]


def test_bytes_of_one_statement_are_bounded(monkeypatch):
    monkeypatch.setattr(log_entries, "CHUNK_BYTES", 100)

    class Entry:
        def __init__(self, size):
            self.size = size

    sizes = [[one.size for one in chunk] for chunk in log_entries._chunks([Entry(n) for n in (60, 50, 40, 500, 1)])]
    assert sizes == [[60], [50, 40], [500], [1]]
    assert Bounds().contents * Bounds().content_seconds > 0


def test_a_search_needs_a_topic_and_the_permission_to_view_payloads(client, make_client, settings):
    put("needle")
    assert "Enter the topic to search in, too." in page(client, "messages", contains="needle")
    assert "at most 200 characters" in page(client, "messages", 400, topic="t", contains="x" * 201)
    viewer = make_client("view_dashboard")
    for redact in ({}, REDACT):
        settings.MYSQLQUEUE = redact
        text = page(viewer, "messages", 403, topic="t", contains="needle")
        assert "you need the permission to view payloads" in text
    assert 'name="contains"' not in page(viewer, "messages", topic="t")
    assert 'name="contains"' in page(client, "messages", topic="t")


def test_a_search_reads_unredacted_texts(client, settings):
    offsets = put({"to": "ada@example.com"})
    settings.MYSQLQUEUE = REDACT
    assert listed(client, topic="t", contains="ada@example.com")[0] == offsets
    assert "ada@example.com<" not in client.get(ADDRESS, {"topic": "t", "contains": "ada"}).content.decode()


def test_a_search_does_not_refresh(client):
    put("needle")
    assert "data-live" in page(client, "messages", topic="t")
    assert "data-live" not in page(client, "messages", topic="t", contains="needle")


# -- copies -------------------------------------------------------------------


def test_a_message_as_json_and_as_command(client, make_client):
    (offset,) = put({"n": 1}, topic="orders", metadata={"a": "b"})
    context = client.get(f"{ROOT}message/", {"offset": offset}).context
    value = json.loads(context["copy_json"])
    assert (value["offset"], value["topic"], value["key"]) == (offset, "orders", "k")
    assert (value["payload"], value["metadata"]["a"]) == ({"n": 1}, "b")
    assert context["copy_command"] == f"manage.py queuetail orders --offset {offset} --limit 1 --format json"
    assert 'id="mq-copy-json"' in page(client, "message", offset=offset)
    viewer = page(make_client("view_dashboard"), "message", offset=offset)
    assert 'id="mq-copy-json"' not in viewer
    assert 'id="mq-copy-command"' in viewer
    (long,) = put("x" * 30_000)
    assert 'id="mq-copy-json"' not in page(client, "message", offset=long)


def test_json_to_copy_is_redacted(client, settings):
    offsets = put({"to": "ada@example.com"}, b"ada@example.com\xff", {"n": 1}, metadata={"by": "ada@example.com"})
    dead = fail_with({"to": "ada@example.com"}, "no ada@example.com")
    settings.MYSQLQUEUE = REDACT
    for offset in (*offsets, dead):
        context = client.get(f"{ROOT}message/", {"offset": offset}).context
        assert "example.com" not in context["copy_json"]
        assert "payload_base64" not in context["copy_json"]
        assert "*" in context["copy_json"]
        value = json.loads(context["copy_json"])
        assert value["payload"] == {"n": 1} or "*" in json.dumps(value["payload"])
    assert value["last_error"]


def test_json_to_copy_is_indented_unless_that_is_too_long_or_not_visible(client):
    nested = functools.reduce(lambda inner, _: [inner], range(300), "x")
    for payload, is_indented in (({"a": "b"}, True), ({"a": "\u202e"}, False), (nested, False)):
        (offset,) = put(payload)[-1:]
        text = client.get(f"{ROOT}message/", {"offset": offset}).context["copy_json"]
        assert json.loads(text)["payload"] == payload
        assert ("\n" in text) == is_indented
        assert "\u202e" not in text


def test_a_dead_letter_as_command(client):
    dead = fail_with({"n": 1}, "no")
    context = client.get(f"{ROOT}deadletter/", {"offset": dead}).context
    assert context["copy_command"] == f"manage.py queueredrive t_dlq --offset {dead}"


# -- what an edit changes -----------------------------------------------------


def test_the_confirmation_of_an_edit_shows_what_changes(client):
    dead = fail_with({"n": 1, "lines": list(range(20)), "last": HOSTILE}, "no")
    edited = {"n": 1, "lines": list(range(20)), "last": "fixed"}
    answer = client.post(f"{ROOT}do/edit/", {"offset": dead, "payload": json.dumps(edited), "asked": "yes"})
    lines = answer.context["diff"]
    assert [line.text for line in lines if line.tag == "ins"] == ['+  "last": "fixed"']
    assert [line.text for line in lines if line.tag == "del"] == [f'-  "last": {json.dumps(HOSTILE)}']
    assert lines[0].text == "@@ -22,5 +22,5 @@"
    assert len(lines) == 7
    text = answer.content.decode()
    assert "<ins>+  &quot;last&quot;: &quot;fixed&quot;</ins>" in text
    assert "<script>alert" not in text
    assert "mq-diff" not in ask(client, "edit", offset=dead)


def test_a_text_that_is_not_json_is_compared_as_it_is(client):
    dead = fail_with(b"one\ntwo", "no")
    answer = client.post(f"{ROOT}do/edit/", {"offset": dead, "payload": "one\r\n2", "asked": "yes"})
    assert [line.text for line in answer.context["diff"]] == ["@@ -1,2 +1,2 @@", " one", "-two", "+2"]


def test_a_diff_is_bounded(monkeypatch):
    monkeypatch.setattr(diffs, "MOST_LINES", 50)
    before = [f"line {number}" for number in range(1000)]
    after = [*before[:500], "new", *before[501:]]
    found = diffs.unified("\n".join(before), "\n".join(after))
    assert found[0].text == "@@ -498,7 +498,7 @@"
    assert [line.text for line in found if line.tag != "span"] == ["-line 500", "+new"]
    (told,) = diffs.unified("\n".join(before), "\n".join(reversed(before)))
    assert told.text == "(too many lines have changed to compare them)"
    assert diffs.unified("a\na\na", "a\na") == [
        ("span", "@@ -1,3 +1,2 @@"),
        ("span", " a"),
        ("span", " a"),
        ("del", "-a"),
    ]
