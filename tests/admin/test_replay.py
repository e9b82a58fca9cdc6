"""The form that replays a range of the log into one group."""

from __future__ import annotations

import re
from html import unescape

import pytest

from django_mysqlqueue.admin.operations.base import IdsField
from django_mysqlqueue.models import Operation, OutboxMessage
from tests.support.dashboard import ROOT, confirm, hidden, page
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler, sequence
from tests.support.scenarios import log, offsets_of

ADDRESS = f"{ROOT}do/replay/"


@pytest.fixture
def settled(db):
    """Two groups have handled four messages; returns their subscriber, what each gets from now on, and the offsets."""
    got, other = Recorder(), Recorder()
    sub = Sub(handler("t", "g", got), handler("t", "h", other))
    offsets = log(4)
    sub.settle()
    got.deliveries.clear()
    other.deliveries.clear()
    return sub, got, other, offsets


def test_the_group_alone_gets_what_was_shown(client, settled):
    sub, got, other, offsets = settled
    (link,) = re.findall(r'href="([^"]*/do/replay/[^"]*)"', page(client, "group", group="g", topic="t"))
    opened = client.get(link)
    assert 'name="confirmed"' not in opened.content.decode()
    assert "errorlist" not in opened.content.decode()
    values = {"first": offsets[1], "last": offsets[3], "reason": "a bug"}
    asked = client.post(ADDRESS, {**hidden(opened.content.decode()), **values})
    text = unescape(asked.content.decode())
    assert f"Messages at the offsets {offsets[1]} to {offsets[3]} that only the group g/t will get again: 3." in text
    assert "Of these, the group has settled or passed: 3." in text
    assert not OutboxMessage.objects.exists()
    done = client.post(ADDRESS, {**hidden(asked.content.decode()), **values, "confirmed": "yes"}, follow=True)
    assert [str(one) for one in done.context["messages"]] == ["Messages published again for the group g/t: 3."]
    assert done.redirect_chain[-1][0] == f"{ROOT}group/?group=g&topic=t"
    sub.settle()
    assert sorted(got.payloads) == [1, 2, 3]
    assert other.payloads == []
    row = Operation.objects.get()
    assert (row.action, row.actor, row.reason, row.changed) == ("replay", "ada0", "a bug", 3)


@pytest.mark.parametrize("sequenced", [False, True])
def test_a_double_click_replays_once_and_another_form_once_more(client, settled, sequenced):
    sub, got, _other, offsets = settled
    values = {"group": "g", "topic": "t", "first": offsets[0], "last": offsets[3], "key": "a"}
    asked = client.post(ADDRESS, {**values, "asked": "yes"})
    for _ in range(2):
        done = client.post(ADDRESS, {**hidden(asked.content.decode()), **values, "confirmed": "yes"}, follow=True)
        if sequenced:
            sequence()
    (told,) = [str(one) for one in done.context["messages"]]
    assert told.endswith("Left out because this run has published them before: 2.")
    sub.settle()
    assert got.payloads == [0, 2]
    confirm(client, "replay", **values)
    sub.settle()
    assert got.payloads == [0, 2, 0, 2]


def test_a_request_replays_no_more_than_its_limit_and_says_where_to_continue(client, settled, monkeypatch):
    monkeypatch.setattr(IdsField, "most", 3)
    sub, got, _other, offsets = settled
    values = {"group": "g", "topic": "t", "last": offsets_of()[-1]}
    (told,) = confirm(client, "replay", **values, first=offsets[0])
    rest = f"This covers the offsets up to {offsets[2]}. To continue, replay from offset {offsets[2] + 1}."
    assert told == f"Messages published again for the group g/t: 3. {rest}"
    assert confirm(client, "replay", **values, first=offsets[3]) == ["Messages published again for the group g/t: 1."]
    sub.settle()
    assert sorted(got.payloads) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"first": "3", "last": "2"}, "last 2: must be at least the first offset, 3"),
        ({"first": "1", "last": "999999999"}, "last 999999999: the log ends at"),
        ({"first": "0", "last": "1"}, "Ensure this value is greater than or equal to 1."),
        ({"first": "1"}, "This field is required."),
        ({"first": "1", "last": "1", "key": "nobody"}, "No message at the offsets 1 to 1 is to be replayed"),
        ({"first": "1", "last": "1", "run": "a b"}, "run 'a b': must be 1 to 60 characters"),
    ],
)
def test_an_invalid_range_is_refused_and_kept(client, settled, values, says):
    answer = client.post(ADDRESS, {"group": "g", "topic": "t", "asked": "yes", **values})
    text = unescape(answer.content.decode())
    assert says in text
    assert 'name="confirmed"' not in text
    assert f'name="first" value="{values["first"]}"' in text
    assert not Operation.objects.exists()
