"""Dead letters by their errors, in which numbers, ids and addresses are masked."""

from __future__ import annotations

import re

from django.db.models import F

from django_mysqlqueue.models import Operation, QueueMessage
from tests.support.dashboard import HOSTILE, ROOT, confirm, page
from tests.support.dead_letter_pages import ask, bound, fail_with, listed, offsets
from tests.support.scenarios import offsets_of


def test_errors_that_differ_in_numbers_are_one_kind_with_its_times_and_operations(client):
    first = fail_with(1, "no customer 1")
    second = fail_with(2, "no customer 22")
    other = fail_with(3, "another")
    QueueMessage.objects.filter(offset=first).update(failed_at=F("failed_at") - 2 * 3_600_000)
    kinds = listed(client)["kinds"]
    assert [(one.line, one.kind.count, one.kind.newest) for one in kinds] == [
        ("ValueError: no customer <number>", 2, second),
        ("ValueError: another", 1, other),
    ]
    assert kinds[0].first < kinds[0].last
    assert 'aria-label="2 in the last 24 hours"' in kinds[0].trend
    assert offsets(listed(client, kind=kinds[0].line)) == [second, first]
    text = page(client, "deadletters")
    assert f'href="{ROOT}deadletter/?offset={second}" aria-label="Show one' in text
    links = [link for link in re.findall(r'href="([^"]*/do/[^"]*kind=[^"]*)"', text) if "customer" in link]
    assert [link.split("/do/")[1].split("/")[0] for link in links] == ["redrive", "discard"]
    asked = client.get(links[0]).content.decode()
    assert "each for the group that failed it: 2." in asked
    (told,) = confirm(client, "discard", topic="t_dlq", kind=kinds[0].line, group="g", upto=other, reason="test")
    assert told.endswith(": 2.")
    assert offsets_of("t_dlq") == [other]
    assert Operation.objects.get().changed == 2


def test_an_operation_on_a_kind_is_bounded_and_names_no_command(client, monkeypatch):
    for number in range(3):
        fail_with(number, f"no {number}")
    bound(monkeypatch, errors=2)
    text = ask(client, "redrive", topic="t_dlq", kind="ValueError: no <number>", upto=10**9)
    assert "Repeat the operation for these." in text
    assert "manage.py" not in text
    assert len(offsets(listed(client, kind="ValueError: no <number>"))) == 2
    assert "There are no such dead letters." in ask(client, "redrive", topic="t_dlq", kind="other", upto=10**9)


def test_kinds_are_of_redacted_texts(make_client, settings):
    """So the filter by kind reveals nothing, and needs no permission to view payloads."""
    fail_with(1, "card of ada@example.com")
    fail_with(2, "card of eve")
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_error_kinds.hide"}
    client = make_client("view_dashboard", "operate_dashboard")
    assert [(one.line, one.kind.count) for one in listed(client)["kinds"]] == [("ValueError: card of *", 2)]
    assert offsets(listed(client, kind="ValueError: card of eve")) == []
    assert len(offsets(listed(client, kind="ValueError: card of *"))) == 2


def hide(text, *, topic, kind):
    return re.sub("of .*", "of *", text)


def test_errors_are_shown_as_text(client):
    fail_with(1, HOSTILE)
    text = client.get(f"{ROOT}deadletters/").content.decode()
    assert "<script>alert" not in text
