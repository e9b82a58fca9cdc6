"""Redrive and discard on the dashboard."""

from __future__ import annotations

import io
import shlex
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import call_command

from django_mysqlqueue.admin.operations import dead_letters as operations
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent, Operation, QueueMessage
from tests.support.dashboard import ROOT, confirm, hidden, page
from tests.support.dead_letter_pages import ask, fail_with, listed, offsets, redriven
from tests.support.scenarios import dead_letters

pytestmark = pytest.mark.any_engine


def test_redrive_the_selected(client):
    dead = dead_letters(4)
    told = confirm(client, "redrive-selected", topic="t_dlq", row=[str(dead[0]), str(dead[2])])
    assert told == ["Dead letters redriven: 2."]
    assert offsets(listed(client)) == [dead[3], dead[1]]
    assert len(redriven()) == 2
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message) == ("t_dlq", "Dead letters redriven: 2.")
    operation = Operation.objects.get()
    assert (operation.action, operation.changed, operation.actor) == ("redrive", 2, "ada0")
    assert operation.detail == f"offsets {dead[0]}, {dead[2]}"


def test_redrive_all_that_match_and_nothing_that_came_later(client):
    fail_with(1, "red")
    fail_with(2, "green")
    context = listed(client, error="red")
    fail_with(3, "red")
    values = {"topic": "t_dlq", "error": "red", "upto": context["upto"]}
    asked = ask(client, "redrive", **values)
    assert "Dead letters of t_dlq that will be redriven, each for the group that failed it: 1." in asked
    assert confirm(client, "redrive", **values) == ["Dead letters redriven: 1."]
    assert LogEntry.objects.get().object_repr == "t_dlq, error contains “red”"
    assert redriven() == [1]
    assert {error for _row, error in listed(client)["rows"]} == {"ValueError: green", "ValueError: red"}


@pytest.mark.parametrize(("name", "more"), [("redrive", {}), ("discard", {"reason": "it's late"})])
def test_all_of_a_key_and_the_filter_is_on_record(client, name, more):
    first = fail_with(1, "red", key="a")
    fail_with(2, "red", key="b")
    last = fail_with(3, "blue", key="a", priority=5)
    values = {"topic": "t_dlq", "key": "a", "upto": last, **more}
    told = confirm(client, name, **values, error="red", group="g", since="1")
    assert told[0].endswith(": 1.")
    assert LogEntry.objects.get().object_repr.startswith("t_dlq, group g, key a, error contains “red”, since 1969-")
    assert ": 1." in confirm(client, name, **values, kind="ValueError: blue")[0]
    assert QueueMessage.objects.filter(offset__in=[first, last]).count() == 0
    assert QueueMessage.objects.filter(topic="t_dlq").count() == 1
    assert list(Operation.objects.order_by("id").values_list("consumer_group", "detail", "changed")) == [
        ("g", f"key 'a', failed since 1970-01-01T00:00:00.001+00:00, up to offset {last}, error contains 'red'", 1),
        (
            "",
            f"key 'a', up to offset {last}, error contains 'ValueError: blue' apart from numbers, ids and addresses",
            1,
        ),
    ]


def test_the_command_for_the_rest_names_the_key(client, monkeypatch):
    monkeypatch.setattr(operations.IdsField, "most", 1)
    upto = [fail_with(number, "red", key="-a b") for number in range(2)][-1]
    (told,) = confirm(client, "redrive", topic="t_dlq", key="-a b", upto=upto)
    command = shlex.split(told.partition("run: ")[2])
    call_command(*command[1:], "--noinput", stdout=io.StringIO())
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()


@pytest.mark.parametrize(("name", "more"), [("redrive", {}), ("discard", {"reason": "it's late"})])
def test_a_request_takes_a_bounded_number_and_names_the_command_for_the_rest(client, monkeypatch, name, more):
    monkeypatch.setattr(operations.IdsField, "most", 2)
    dead = dead_letters(5)
    values = {"topic": "t_dlq", "group": "g", "error": "ValueError", "upto": dead[-1], **more}
    assert "Remaining: 3 dead letters" in ask(client, name, **values)
    (told,) = confirm(client, name, **values)
    assert ": 2. One request changes the oldest 2. Remaining: 3 dead letters." in told
    assert offsets(listed(client)) == dead[:1:-1]
    command = shlex.split(told.partition("run: ")[2])
    call_command(*command[1:], "--noinput", stdout=io.StringIO())
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()
    assert Operation.objects.filter(action=name, changed__gt=0).count() == 2


def test_the_link_of_the_page_asks_for_what_the_page_shows(client):
    dead = dead_letters(2)
    text = page(client, "deadletters", error="ValueError", since="2020-01-01T00:00")
    (link,) = [one for one in text.split('"') if "/do/redrive/" in one and "kind=" not in one]
    asked = unescape(client.get(link).content.decode())
    assert "that failed it: 2." in asked
    assert hidden(client.get(link).content.decode())["upto"] == [str(dead[-1])]


def test_with_a_rate_a_request_is_short(client, monkeypatch):
    monkeypatch.setattr(operations, "SECONDS", 0.1)
    dead = dead_letters(3)
    told = confirm(client, "redrive", topic="t_dlq", upto=dead[-1], rate="20")
    assert told[0].startswith("Dead letters redriven: 2. One request changes the oldest 2. Remaining: 1 dead letter.")
    assert "--rate 20.0" in told[0]
    assert "greater than or equal to 0.1" in ask(client, "redrive", topic="t_dlq", upto=dead[-1], rate="0")


def test_letters_of_a_group_that_is_gone_are_not_redriven(client):
    (offset,) = dead_letters(1)
    ConsumerGroup.objects.all().delete()
    for name, values in (
        ("redrive", {"topic": "t_dlq", "upto": offset}),
        ("redrive-selected", {"topic": "t_dlq", "row": [str(offset)]}),
        ("edit", {"offset": offset, "payload": "5"}),
    ):
        text = ask(client, name, **values)
        assert "is no longer registered and would not receive it" in text
        assert 'name="confirmed"' not in text


def test_discard_needs_a_reason(client):
    dead = dead_letters(3)
    for name, values in (
        ("discard-selected", {"topic": "t_dlq", "row": [str(dead[0])]}),
        ("discard", {"topic": "t_dlq", "upto": dead[-1]}),
    ):
        asked = ask(client, name, **values)
        assert "Enter a reason" not in asked
        assert 'name="confirmed"' in asked, "the preview does not need it"
        for reason in ("", "  "):
            sent = {**hidden(asked), **values, "reason": reason, "confirmed": "yes"}
            answer = client.post(f"{ROOT}do/{name}/", sent)
            assert answer.status_code == 200
            assert "Enter a reason: the audit log is the only trace of what is deleted." in answer.content.decode()
            assert "the form differs" not in answer.content.decode()
    assert offsets(listed(client)) == dead[::-1]
    told = confirm(client, "discard-selected", topic="t_dlq", row=[str(dead[0])], reason="spoilt")
    assert told == ["Dead letters deleted: 1."]
    assert "This cannot be undone." in ask(client, "discard", topic="t_dlq", upto=dead[-1], reason="x")
    assert confirm(client, "discard", topic="t_dlq", upto=dead[-1], reason="x") == ["Dead letters deleted: 2."]
    assert set(DeliveryEvent.objects.filter(outcome="discarded").values_list("error", flat=True)) == {"spoilt", "x"}


def test_several_groups_are_named(client):
    dead_letters(1)
    dead_letters(1, group="h")  # fails both messages
    text = ask(client, "discard", topic="t_dlq", upto=10**9, reason="x")
    assert "h/t: 2." in text
    assert "g/t: 1." in text


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "Nothing is selected."),
        ({"row": ["0"]}, "The selection is invalid"),
        ({"row": [str(2**70)]}, "The selection is invalid"),
        ({"row": ["1", "2", "3"]}, "the maximum is 2"),
        ({"row": ["123456"]}, "There are no such dead letters."),
    ],
)
def test_a_selection_of_nothing_is_refused(client, monkeypatch, values, says):
    monkeypatch.setattr("django_mysqlqueue.admin.operations.base.IdsField.most", 2)
    dead_letters(1)
    text = ask(client, "redrive-selected", topic="t_dlq", **values)
    assert says in text
    assert 'name="confirmed"' not in text
