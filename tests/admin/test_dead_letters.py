"""The dashboard's list of dead letters."""

from __future__ import annotations

import datetime

import pytest

from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.pages import dead_letters as pages
from django_mysqlqueue.models import QueueMessage
from tests.support.dashboard import ROOT, page
from tests.support.dead_letter_pages import ask, bound, fail_with, listed, offsets
from tests.support.harness import Sub, handler
from tests.support.scenarios import dead_letters, offsets_of

pytestmark = pytest.mark.any_engine


def test_letters_are_listed_newest_first_with_where_they_come_from(client):
    dead = dead_letters(3)
    context = listed(client)
    assert offsets(context) == dead[::-1]
    first = offsets_of("t")
    rows = {row.offset: (row, error) for row, error in context["rows"]}
    row, error = rows[dead[0]]
    stored = QueueMessage.objects.get(offset=dead[0])
    assert (row.ref, row.key, row.attempts) == (("g", "t"), stored.partition_key, 1)
    assert {one.original_offset for one, _ in context["rows"]} == set(first)
    assert (row.size, row.failed_at) == (stored.size, stored.failed_at)
    assert error.startswith("ValueError: no ")
    text = page(client, "deadletters")
    assert f"message/?offset={stored.original_offset}" in text
    assert "Dead letters in t_dlq: 3" in text


def test_they_come_in_pages(client, monkeypatch):
    monkeypatch.setattr(pages, "PAGE_ROWS", 2)
    dead = dead_letters(5)
    seen, before = [], None
    while True:
        context = listed(client, **({} if before is None else {"before": before}))
        seen += offsets(context)
        before = context["next_place"]
        if before is None:
            break
        assert len(seen) % 2 == 0
    assert seen == dead[::-1]


def test_the_fullest_topic_is_shown_unless_another_is_named(client):
    one = dead_letters(1, topic="a")
    two = dead_letters(2, topic="b")
    assert offsets(listed(client)) == two[::-1]
    for name in ("a", "a_dlq"):
        context = listed(client, topic=name)
        assert context["topic"] == "a_dlq"
        assert offsets(context) == one
    assert context["topics"] == [("a", "a (1)"), ("b", "b (2)")]
    assert offsets(listed(client, topic="none")) == []
    assert '<option value="none" selected>' in page(client, "deadletters", topic="none")


def test_filters(client, clock):
    first = fail_with(1, "red apple")
    clock.advance(3600)
    second = fail_with(2, "green apple")
    third = fail_with(3, "green pear", group="h")  # h fails all three
    ours = [second, first]
    assert offsets(listed(client, group="g")) == ours
    assert offsets(listed(client, group="g", error="green")) == [second]
    assert offsets(listed(client, error="pear"))[0] == third
    assert not offsets(listed(client, error="PEAR"))
    assert not offsets(listed(client, group="x"))
    failed = QueueMessage.objects.get(offset=second).failed_at
    at = moment(failed)[:19].replace(" ", "T")
    assert offsets(listed(client, group="g", since=at)) == [second]
    # The second that is named is meant as a whole.
    assert offsets(listed(client, group="g", until=at)) == ours
    assert offsets(listed(client, group="g", until=moment(failed - 60_000)[:16].replace(" ", "T"))) == [first]
    assert {"g", "h"} <= set(listed(client, group="g")["groups"])


@pytest.mark.parametrize("use_tz", [True, False])
def test_times_are_in_the_projects_zone(client, settings, use_tz):
    settings.USE_TZ = use_tz
    settings.TIME_ZONE = "Asia/Tokyo"
    context = listed(client, topic="t", since="2026-01-02T09:00")
    assert context["since"] == datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC).timestamp() * 1000


@pytest.mark.parametrize("query", [{"since": "soon"}, {"until": "2026-13-01T00:00"}, {"before": "x"}, {"before": "-1"}])
def test_a_filter_that_cannot_be_read_is_told_so(client, query):
    ((name, value),) = query.items()
    dead_letters(1)
    assert f"{name}='{value}'" in page(client, "deadletters", 400, **query)


def test_errors_are_counted_by_group_and_last_line_and_lead_to_the_filter(client):
    for payload, error in enumerate(("red\napple", "an\napple", "a pear")):
        fail_with(payload, error)
    kinds = [row.kind for row in client.get(f"{ROOT}deadletters/").context["kinds"].rows]
    assert [(kind.ref.group, kind.text, str(kind.dead_letters)) for kind in kinds] == [
        ("g", "apple", "2"),
        ("g", "ValueError: a pear", "1"),
    ]
    assert "deadletters/?topic=t_dlq&group=g&kind=ValueError%3A+a+pear" in page(client, "deadletters")
    assert len(offsets(listed(client, group="g", error="apple"))) == 2


def test_more_than_a_look_goes_through_is_said(client, monkeypatch):
    bound(monkeypatch, dead_letters=4)
    dead_letters(4, keys="a")
    assert "more than" not in page(client, "deadletters")
    dead_letters(1, keys="b")
    context = listed(client)
    assert (str(context["found"].count), len(context["rows"])) == ("4+", 4)
    assert "This topic has more than 4 dead letters." in page(client, "deadletters")
    assert "Remaining: possibly more" in ask(client, "redrive", topic="t_dlq", upto=10**9)


def test_errors_are_searched_in_the_newest_alone_and_that_is_said(client, monkeypatch):
    bound(monkeypatch, errors=2)
    red, *green = (fail_with(place, error) for place, error in enumerate(("red", "green", "green")))
    context = listed(client, error="green")
    assert (offsets(context), str(context["found"].count), context["found"].whole) == (green[::-1], "2+", False)
    assert not offsets(listed(client, error="red"))
    assert "Only the newest 2 errors are searched" in page(client, "deadletters", error="red")
    assert "errors are searched" not in page(client, "deadletters")
    assert offsets(listed(client, error="red", until="2020-01-01T00:00")) == []
    assert "Remaining: possibly more" in ask(client, "redrive", topic="t_dlq", error="green", upto=10**9)
    assert offsets(listed(client))[-1] == red


def test_a_dlq_topic_with_a_handler_of_its_own_is_readable(client):
    (offset,) = dead_letters(1)
    Sub(handler("t_dlq", "reader")).settle()
    context = listed(client)
    assert offsets(context) == [offset]
    assert [ref.group for ref in context["readers"]] == ["reader"]
    assert "Consumer groups that read t_dlq" in page(client, "deadletter", offset=offset)
