"""The dashboard's pages of dead letters and of scheduled messages, and what is done there."""

# The fixtures are imported from test_admin and named again as arguments.
# ruff: noqa: F811
from __future__ import annotations

import datetime
import io
import json
import re
import shlex
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import call_command
from django.db import connection

from django_mysqlqueue import publish
from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.operations import dead_letters as operations
from django_mysqlqueue.admin.operations import scheduled as scheduled_operations
from django_mysqlqueue.admin.pages import dead_letters as pages
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection import dead_letters as letters
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent, Operation, OutboxMessage, QueueMessage
from django_mysqlqueue.operations import redriving
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.sql.session import Session
from tests.support.harness import USING, Sub, handler, sequence
from tests.test_admin import HOSTILE, ROOT, client, confirm, hidden, make_client, page  # noqa: F401
from tests.test_conformance import Recorder, fail
from tests.test_operations import dead_letters, offsets_of

pytestmark = pytest.mark.any_engine


def listed(client, **query):
    return client.get(f"{ROOT}deadletters/", query).context


def offsets(context):
    return [row.letter.offset for row in context.get("rows", [])]


def bound(monkeypatch, **bounds):
    """The pages, and the operations on what they list, read no more than that."""
    for reader in (Page, operations.DeadLettersOperation):
        monkeypatch.setattr(reader, "bounds", Bounds(**bounds))


def ask(client, name, **values):
    """The page that asks, as text."""
    answer = client.post(f"{ROOT}do/{name}/", {**values, "asked": "yes"})
    assert answer.status_code == 200
    return unescape(answer.content.decode())


def fail_with(payload, error, *, group="g", topic="t", **options):
    """One dead letter whose handler said ``error``; returns its offset."""

    def function(delivery):
        raise ValueError(error)

    publish(topic, payload, **options)
    sub = Sub(handler(topic, group, function, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    return offsets_of(f"{topic}_dlq")[-1]


# -- the list -----------------------------------------------------------------


def test_letters_are_listed_newest_first_with_where_they_come_from(client):
    dead = dead_letters(3)
    context = listed(client)
    assert offsets(context) == dead[::-1]
    first = offsets_of("t")
    rows = {row.letter.offset: row for row in context["rows"]}
    row = rows[dead[0]]
    stored = QueueMessage.objects.get(offset=dead[0])
    assert (row.letter.ref, row.letter.key, row.letter.attempts) == (("g", "t"), stored.partition_key, 1)
    assert {one.letter.original_offset for one in context["rows"]} == set(first)
    assert (row.letter.size, row.failed_at) == (stored.size, moment(stored.failed_at))
    assert row.error.startswith("ValueError: no ")
    text = page(client, "deadletters")
    assert f"message/?offset={stored.original_offset}" in text
    assert "3 in t_dlq" in text


def test_they_come_in_pages(client, monkeypatch):
    monkeypatch.setattr(pages, "PAGE_ROWS", 2)
    dead = dead_letters(5)
    seen, before = [], None
    while True:
        context = listed(client, **({} if before is None else {"before": before}))
        seen += offsets(context)
        before = context["next_before"]
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
    assert [(name, str(number)) for name, number in context["topics"]] == [("a_dlq", "1"), ("b_dlq", "2")]
    assert offsets(listed(client, topic="none")) == []
    assert "none_dlq (0)" in page(client, "deadletters", topic="none")


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
    context = listed(client)
    assert [(one.kind.ref.group, one.line, one.kind.count) for one in context["kinds"]] == [
        ("g", "apple", 2),
        ("g", "ValueError: a pear", 1),
    ]
    assert "?group=g&error=ValueError%3A+a+pear&topic=t_dlq" in page(client, "deadletters")
    assert len(offsets(listed(client, group="g", error="apple"))) == 2


def test_more_than_a_look_goes_through_is_said(client, monkeypatch):
    bound(monkeypatch, dead_letters=4)
    dead_letters(4, keys="a")
    assert "more than" not in page(client, "deadletters")
    dead_letters(1, keys="b")
    context = listed(client)
    assert (str(context["found"].count), len(context["rows"])) == ("4+", 4)
    assert "This topic has more than 4 dead letters." in page(client, "deadletters")
    assert "left: maybe more" in ask(client, "redrive", topic="t_dlq", upto=10**9)


def test_errors_are_searched_in_the_newest_alone_and_that_is_said(client, monkeypatch):
    bound(monkeypatch, errors=2)
    red, *green = (fail_with(place, error) for place, error in enumerate(("red", "green", "green")))
    context = listed(client, error="green")
    assert (offsets(context), str(context["found"].count), context["found"].whole) == (green[::-1], "2+", False)
    assert not offsets(listed(client, error="red"))
    assert "in the newest 2 errors alone" in page(client, "deadletters", error="red")
    assert "errors alone" not in page(client, "deadletters")
    assert offsets(listed(client, error="red", until="2020-01-01T00:00")) == []
    assert "left: maybe more" in ask(client, "redrive", topic="t_dlq", error="green", upto=10**9)
    assert offsets(listed(client))[-1] == red


def test_a_dlq_topic_with_a_handler_of_its_own_is_readable(client):
    (offset,) = dead_letters(1)
    Sub(handler("t_dlq", "reader")).settle()
    context = listed(client)
    assert offsets(context) == [offset]
    assert [ref.group for ref in context["readers"]] == ["reader"]
    assert "A handler works on t_dlq" in page(client, "deadletter", offset=offset)
    assert "reader" not in context["groups"]


# -- a single one -------------------------------------------------------------


def test_a_letter_shows_all_of_it(client):
    offset = fail_with({"order": [7, "ä"]}, "first\nsecond", key="k", id="seven", metadata={"from": "web"})
    text = page(client, "deadletter", offset=offset)
    original = QueueMessage.objects.get(offset=offset).original_offset
    for said in ('"order": [\n    7,\n    "ä"', '"from": "web"', "first\nsecond", "Traceback", "seven"):
        assert said in text
    assert f"message/?offset={original}" in text
    assert f"Dead letter {offset}" in text
    (event,) = client.get(f"{ROOT}deadletter/", {"offset": offset}).context["events"]
    assert (event.delivery.outcome, event.delivery.offset) == ("dead_lettered", original)


def test_a_letter_that_was_redriven_shows_where_it_went(client):
    (offset,) = dead_letters(1)
    redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor="ada")
    text = page(client, "deadletter", offset=offset)
    assert "no dead letter at offset" in text
    assert "not in the log (yet" in text
    sequence()
    (event,) = client.get(f"{ROOT}deadletter/", {"offset": offset}).context["events"]
    sent = QueueMessage.objects.get(target_group="g")
    assert (event.delivery.outcome, event.delivery.by) == ("redriven", "ada")
    assert event.link.endswith(f"message/?offset={sent.offset}")
    assert sent.message_id in page(client, "deadletter", offset=offset)


def test_a_discarded_letter_shows_why(client):
    (offset,) = dead_letters(1)
    redriving.discard(USING, DeadLetterFilter("t_dlq"), actor="ada", reason="of a test")
    text = page(client, "deadletter", offset=offset)
    assert "discarded" in text
    assert "of a test" in text


@pytest.mark.parametrize(("query", "status"), [({}, 400), ({"offset": "x"}, 400), ({"offset": "77"}, 200)])
def test_a_letter_that_is_none(client, query, status):
    text = page(client, "deadletter", status, **query)
    assert ("never one" in text) == (status == 200)


def test_another_message_is_no_letter(client):
    dead_letters(1)
    (offset,) = offsets_of("t")
    assert "There is no dead letter at offset" in page(client, "deadletter", offset=offset)


def test_a_hostile_letter_is_shown_as_text(client):
    offset = fail_with({"x": HOSTILE}, f"one\n{HOSTILE}", key=HOSTILE, id=HOSTILE, metadata={"m": HOSTILE})
    for name, query in (
        ("deadletters", {}),
        ("deadletters", {"error": HOSTILE, "group": HOSTILE, "topic": "t"}),
        ("deadletter", {"offset": offset}),
        ("do/edit", {"offset": offset}),
    ):
        text = client.get(f"{ROOT}{name}/", query).content.decode()
        assert "<script>alert" not in text
        assert "\"'&" not in text
        assert "&lt;script&gt;" in text


def test_who_may_not_see_payloads_does_not(make_client):
    offset = fail_with({"secret": 1}, "broken", metadata={"covert": 2})
    client = make_client("view_dashboard", "operate_dashboard")
    text = page(client, "deadletter", offset=offset)
    assert "secret" not in text
    assert "covert" not in text
    assert "broken" in text
    assert "do/edit/" not in text
    for send in (client.get, client.post):
        assert send(f"{ROOT}do/edit/", {"offset": offset}).status_code == 403
    assert "secret" in page(make_client("view_dashboard", "see_payloads"), "deadletter", offset=offset)
    assert make_client("view_dashboard", "see_payloads").get(f"{ROOT}do/edit/").status_code == 403


def test_who_may_not_operate_gets_no_button(make_client):
    (offset,) = dead_letters(1)
    publish("t", 1, delay=60)
    client = make_client("view_dashboard", "see_payloads")
    for name, query in (("deadletters", {}), ("deadletter", {"offset": offset}), ("scheduled", {})):
        text = page(client, name, **query)
        own = text[text.index('id="mq-live"') :]
        assert 'type="checkbox"' not in own
        assert "<button" not in own
        assert 'class="button' not in own


def star(text, *, topic, kind):
    assert topic == "t"
    assert kind in ("payload", "metadata", "error")
    return text.replace("4711", "****")


def test_what_is_redacted_is_nowhere_and_cannot_be_edited(client, settings):
    offset = fail_with({"card": 4711}, "card 4711", metadata={"m": 4711})
    open_offset = fail_with({"card": 1}, "no card")
    settings.MYSQLQUEUE = {"REDACT": star}
    for name, query in (("deadletters", {}), ("deadletter", {"offset": offset}), ("do/edit", {"offset": offset})):
        text = page(client, name, **query)
        assert "4711" not in text
        assert "****" in text or name == "do/edit"
    assert "do/edit/" not in page(client, "deadletter", offset=offset)
    refused = ask(client, "edit", offset=offset, payload="{}")
    assert "editing would lose them" in refused
    assert "<textarea" not in refused
    assert "do/edit/" in page(client, "deadletter", offset=open_offset)


def test_a_secret_that_a_list_would_cut_in_half_is_hidden(client, settings):
    """Lists read the end of an error: of a long line it may be a part of what is to be hidden."""
    secret = "token=" + "5" * 400
    offset = fail_with(1, secret)
    short = fail_with(2, "token=5")
    assert "5" * 299 in page(client, "deadletters")
    settings.MYSQLQUEUE = {"REDACT": lambda text, **_named: re.sub(r"token=\d+", "(token)", text)}
    text = page(client, "deadletters")
    assert "5" * 8 not in text
    assert "too long to be redacted" in text
    assert "ValueError: (token)" in text
    for one in (offset, short):
        text = page(client, "deadletter", offset=one)
        assert "5" * 8 not in text
        assert "ValueError: (token)" in text


def test_errors_cannot_be_searched_for_what_redact_hides(make_client, settings):
    """One who may not see payloads guesses a card number from which searches find its letter."""
    offset = fail_with({"card": 4711}, "card 4711")
    fail_with({"card": 1}, "no card")
    user = make_client("view_dashboard", "operate_dashboard")
    assert offsets(listed(user, error="card 47")) == [offset], "nothing is hidden"
    settings.MYSQLQUEUE = {"REDACT": star}
    wanted = {"topic": "t_dlq", "upto": 10**9, "reason": "x"}
    for guess in ("card 47", " ", "no letter says that"):
        assert "You cannot filter by error text" in page(user, "deadletters", 403, error=guess)
        for name in ("redrive", "discard"):
            for answer in (
                user.get(f"{ROOT}do/{name}/", {**wanted, "error": guess}),
                user.post(f"{ROOT}do/{name}/", {**wanted, "error": guess, "asked": "yes"}),
                user.post(f"{ROOT}do/{name}/", {**wanted, "error": guess, "confirmed": "yes", "previewed": "0"}),
            ):
                text = unescape(answer.content.decode())
                assert answer.status_code == 403
                assert "You cannot filter by error text" in text
                assert "dead letters" not in text.split("errornote")[1]
                assert 'name="confirmed"' not in text
    assert len(offsets_of("t_dlq")) == 2
    text = page(user, "deadletters")
    assert "ValueError: no card" in text
    assert "Error contains" not in text
    assert "&error=V" not in text
    assert "that will be deleted: 2." in ask(user, "discard", **wanted)
    for allowed in (make_client("view_dashboard", "see_payloads"), make_client(superuser=True)):
        assert offsets(listed(allowed, error="no card")) != []
        assert "Error contains" in page(allowed, "deadletters")


# -- redrive and discard ------------------------------------------------------


def redriven(group="g", topic="t"):
    got = Recorder()
    Sub(handler(topic, group, got)).settle()
    return sorted(got.payloads)


def test_redrive_the_selected(client):
    dead = dead_letters(4)
    told = confirm(client, "redrive-selected", topic="t_dlq", row=[str(dead[0]), str(dead[2])])
    assert told == ["Dead letters sent back: 2."]
    assert offsets(listed(client)) == [dead[3], dead[1]]
    assert len(redriven()) == 2
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message) == ("t_dlq", "Dead letters sent back: 2.")
    operation = Operation.objects.get()
    assert (operation.action, operation.changed, operation.actor) == ("redrive", 2, "ada0")


def test_redrive_all_that_match_and_nothing_that_came_later(client):
    fail_with(1, "red")
    fail_with(2, "green")
    context = listed(client, error="red")
    fail_with(3, "red")
    values = {"topic": "t_dlq", "error": "red", "upto": context["upto"]}
    asked = ask(client, "redrive", **values)
    assert "Dead letters of t_dlq that will be sent back, each to the group that failed it: 1." in asked
    assert confirm(client, "redrive", **values) == ["Dead letters sent back: 1."]
    assert LogEntry.objects.get().object_repr == "t_dlq, error with “red”"
    assert redriven() == [1]
    assert {row.error for row in listed(client)["rows"]} == {"ValueError: green", "ValueError: red"}


@pytest.mark.parametrize(("name", "more"), [("redrive", {}), ("discard", {"reason": "it's late"})])
def test_a_request_takes_a_bounded_number_and_names_the_command_for_the_rest(client, monkeypatch, name, more):
    monkeypatch.setattr(operations, "AT_ONCE", 2)
    dead = dead_letters(5)
    values = {"topic": "t_dlq", "group": "g", "error": "ValueError", "upto": dead[-1], **more}
    assert "left: 3 dead letters" in ask(client, name, **values)
    (told,) = confirm(client, name, **values)
    assert ": 2. One request takes the oldest 2; left: 3 dead letters." in told
    assert offsets(listed(client)) == dead[:1:-1]
    command = shlex.split(told.partition("All at once: ")[2])
    call_command(*command[1:], "--noinput", stdout=io.StringIO())
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()
    assert Operation.objects.filter(action=name, changed__gt=0).count() == 2


def test_the_link_of_the_page_asks_for_what_the_page_shows(client):
    dead = dead_letters(2)
    text = page(client, "deadletters", error="ValueError", since="2020-01-01T00:00")
    (link,) = [one for one in text.split('"') if "/do/redrive/" in one]
    asked = unescape(client.get(link).content.decode())
    assert "that failed it: 2." in asked
    assert hidden(client.get(link).content.decode())["upto"] == [str(dead[-1])]


def test_with_a_rate_a_request_is_short(client, monkeypatch):
    monkeypatch.setattr(operations, "SECONDS", 0.1)
    dead = dead_letters(3)
    told = confirm(client, "redrive", topic="t_dlq", upto=dead[-1], rate="20")
    assert told[0].startswith("Dead letters sent back: 2. One request takes the oldest 2; left: 1 dead letter.")
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
        assert "is not registered any more: nobody would get" in text
        assert 'name="confirmed"' not in text


def test_discard_needs_a_reason(client):
    dead = dead_letters(3)
    for name, values in (
        ("discard-selected", {"topic": "t_dlq", "row": [str(dead[0])]}),
        ("discard", {"topic": "t_dlq", "upto": dead[-1]}),
    ):
        for reason in ("", "  "):
            text = ask(client, name, **values, reason=reason)
            assert "This field is required." in text
            assert 'name="confirmed"' not in text
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
    assert "Of h/t: 2." in text
    assert "Of g/t: 1." in text


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "Nothing is selected."),
        ({"row": ["0"]}, "The selection cannot be read"),
        ({"row": [str(2**70)]}, "The selection cannot be read"),
        ({"row": ["1", "2", "3"]}, "at most 2"),
        ({"row": ["123456"]}, "There is no such dead letter (any more)."),
    ],
)
def test_a_selection_of_nothing_is_refused(client, monkeypatch, values, says):
    monkeypatch.setattr("django_mysqlqueue.admin.operations.base.IdsField.most", 2)
    dead_letters(1)
    text = ask(client, "redrive-selected", topic="t_dlq", **values)
    assert says in text
    assert 'name="confirmed"' not in text


# -- edit and redrive ---------------------------------------------------------


def test_edit_and_redrive(client):
    offset = fail_with({"order": "ä"}, "broken", key="k", id="seven", metadata={"from": "web"})
    asked = client.get(f"{ROOT}do/edit/", {"offset": offset})
    assert asked.context["form"]["payload"].value() == '{\n  "order": "ä"\n}'
    assert b"This is what failed" not in asked.content
    assert b'name="confirmed"' not in asked.content
    text = ask(client, "edit", offset=offset, payload='{"order": "ö"}')
    assert "A new message (size in bytes: 14) will replace the dead letter, for the group g/t alone." in text
    (told,) = confirm(client, "edit", offset=offset, payload='{\r\n"order": "ö"}')
    sequence()
    sent = QueueMessage.objects.get(target_group="g")
    assert told == f"The message {sent.message_id} replaces the dead letter."
    assert json.loads(bytes(sent.payload)) == {"order": "ö"}
    assert sent.metadata["from"] == "web"
    assert redriven() == [{"order": "ö"}]
    assert not offsets(listed(client))
    assert "edited and redriven" in page(client, "deadletter", offset=offset)
    assert LogEntry.objects.get().object_repr == f"dead letter {offset}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"order": ', "Not JSON: Expecting value, in line 1, column 11."),
        ('{"order": NaN}', "Not JSON: NaN."),
        ('{"order": 1e999}', "cannot be written as JSON"),
        ('"\\ud800"', "cannot be written as JSON"),
        ("[" * 100_000, "Not JSON"),
        ('"' + "x" * 200 + '"', "MAX_PAYLOAD_BYTES allows 100"),
        ('{"order":7}', "This is what failed"),
        ("", "This field is required."),
    ],
)
def test_a_payload_that_cannot_be_sent_is_told_so_and_kept(client, settings, text, says):
    offset = fail_with({"order": 7}, "broken")
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 100} if "MAX" in says else {}
    asked = client.post(f"{ROOT}do/edit/", {"offset": offset, "payload": text, "asked": "yes", "confirmed": "yes"})
    form = asked.context["form"]
    assert says in str(form.errors["payload"][0])
    assert form["payload"].value() == text
    assert says in unescape(asked.content.decode())
    assert b'name="confirmed"' not in asked.content
    assert offsets(listed(client)) == [offset]
    assert not OutboxMessage.objects.exists()


def test_what_is_sent_is_what_was_previewed(client):
    offset = fail_with({"order": 7}, "broken")
    address = f"{ROOT}do/edit/"
    asked = client.post(address, {"offset": offset, "payload": "8", "asked": "yes"})
    again = client.post(address, {**hidden(asked.content.decode()), "payload": "9", "confirmed": "yes"})
    assert again.status_code == 200
    assert not OutboxMessage.objects.exists()


def test_a_letter_that_somebody_else_took_meanwhile(client):
    offset = fail_with(7, "broken")
    address = f"{ROOT}do/edit/"
    asked = client.post(address, {"offset": offset, "payload": "8", "asked": "yes"})
    redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor="eve")
    late = client.post(address, {**hidden(asked.content.decode()), "payload": "8", "confirmed": "yes"})
    assert "There is no dead letter at this offset (any more)." in unescape(late.content.decode())
    assert OutboxMessage.objects.count() == 1


def plain(payload, metadata="{}"):
    """A dead letter whose message plain SQL enqueued."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO queue_outbox (topic, payload, metadata) VALUES ('t', %s, %s)", (payload, metadata))
    sub = Sub(handler("t", "g", fail, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    return offsets_of("t_dlq")[-1]


def test_broken_json_of_plain_sql_becomes_json(client):
    offset = plain(b'{"order": 7')
    text = '{"order": 7}'
    assert client.get(f"{ROOT}do/edit/", {"offset": offset}).context["form"]["payload"].value() == '{"order": 7'
    confirm(client, "edit", offset=offset, payload=text)
    assert redriven() == [{"order": 7}]


def test_what_says_that_it_is_json_and_is_not_must_become_json(client):
    offset = plain(b'{"order": 7', '{"content_type": "application/json"}')
    assert "Not JSON" in ask(client, "edit", offset=offset, payload='{"order": 8')
    confirm(client, "edit", offset=offset, payload='{"order": 8}')
    assert redriven() == [{"order": 8}]


def test_a_text_keeps_its_line_ends(client):
    offset = fail_with(b"one\ntwo", "broken", metadata={"content_type": "text/plain"})
    assert client.get(f"{ROOT}do/edit/", {"offset": offset}).context["form"]["payload"].value() == "one\ntwo"
    assert "This is what failed" in ask(client, "edit", offset=offset, payload="one\r\ntwo")
    confirm(client, "edit", offset=offset, payload="one\r\nthree")
    sequence()
    sent = QueueMessage.objects.get(target_group="g")
    assert bytes(sent.payload) == b"one\nthree"
    assert sent.metadata["content_type"] == "text/plain"


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"\xff\x00", "The payload is not text"),
        (b"one\r\ntwo", "would change the line ends"),
        (b"x" * 300_000, "too long to be edited here"),
    ],
)
def test_what_a_form_cannot_carry_is_not_edited(client, payload, says):
    offset = fail_with(payload, "broken")
    text = page(client, "deadletter", offset=offset)
    assert says in text
    assert "do/edit/" not in text
    assert f"{len(payload):,} bytes in all" in text or len(payload) < 100
    for answer in (page(client, "do/edit", offset=offset), ask(client, "edit", offset=offset, payload="x")):
        assert says in answer
        assert "<textarea" not in answer


@pytest.mark.parametrize("offset", ["", "x", "0", "99", "9" * 40])
def test_an_edit_of_nothing(client, offset):
    text = ask(client, "edit", offset=offset, payload="1")
    assert "<textarea" not in text
    assert 'name="confirmed"' not in text


# -- scheduled ----------------------------------------------------------------


def schedule(number, *, topic="t", delay=3600, **options):
    for place in range(number):
        publish(topic, {"place": place}, delay=delay + place, **options)
    return list(
        OutboxMessage.objects.filter(topic=topic).order_by("deliver_at", "outbox_id").values_list("pk", flat=True)
    )


def ids(context):
    return [row.message.outbox_id for row in context["rows"]]


def waiting(client, **query):
    return client.get(f"{ROOT}scheduled/", query).context


def test_scheduled_messages_by_time_in_pages(client, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.scheduled.PAGE_ROWS", 2)
    late = schedule(3, delay=9000)
    early = schedule(2, topic="u", delay=60)
    publish("t", "at once")
    seen, after = [], ""
    while after is not None:
        context = waiting(client, after=after)
        seen += ids(context)
        after = context["next_after"]
    assert seen == [*early, *late]
    assert [(name, str(number)) for name, number in context["topics"]] == [("t", "3"), ("u", "2")]
    context = waiting(client, topic="t")
    assert (ids(context), context["whole"]) == (late[:2], True)
    assert ids(waiting(client, topic="t", after=context["next_after"])) == late[2:]
    assert not ids(waiting(client, topic="none"))
    row = waiting(client, topic="t")["rows"][0]
    assert row.left.startswith("2 h ")
    assert row.message.size == OutboxMessage.objects.get(pk=late[0]).size


def test_of_one_topic_a_look_goes_so_far_and_the_next_goes_on(client, monkeypatch):
    bound(monkeypatch, scheduled=3)
    schedule(4, topic="u", delay=60)
    ours = schedule(1)
    context = waiting(client, topic="t")
    assert (ids(context), context["whole"]) == ([], False)
    assert context["next_after"]
    assert "looked through" in page(client, "scheduled", topic="t")
    context = waiting(client, topic="t", after=context["next_after"])
    assert (ids(context), context["whole"], context["next_after"]) == (ours, True, None)


@pytest.mark.parametrize("after", ["x", "1", "1-", "-1", "1-²"])
def test_a_place_in_the_list_that_is_none(client, after):
    assert f"after='{after}'" in page(client, "scheduled", 400, after=after)


def test_payloads_of_scheduled_messages(make_client, settings):
    publish("t", {"card": 4711, "x": HOSTILE}, delay=60, metadata={"m": HOSTILE})
    publish("t", b"y" * 50_000, delay=61)
    client = make_client("view_dashboard", "see_payloads")
    raw = client.get(f"{ROOT}scheduled/").content.decode()
    assert "<script>alert" not in raw
    assert "4711" in raw
    assert "50,000 bytes in all" in raw
    assert raw.count("yyyyyyyyyy") == 2000
    settings.MYSQLQUEUE = {"REDACT": star}
    text = page(client, "scheduled")
    assert "4711" not in text
    assert "****" in text
    blind = make_client("view_dashboard", "operate_dashboard")
    settings.MYSQLQUEUE = {}
    assert "4711" not in page(blind, "scheduled")
    assert "<details" not in page(blind, "scheduled")


def test_cancel_the_selected(client):
    first, second, third = schedule(3)
    text = ask(client, "cancel", row=[str(first)])
    assert "Scheduled messages that will be deleted, so that no group receives them: 1." in text
    told = confirm(client, "cancel", row=[str(first), str(third)], reason="twice")
    assert told == ["Scheduled messages cancelled: 2."]
    assert ids(waiting(client)) == [second]
    operation = Operation.objects.get()
    assert (operation.action, operation.changed, operation.reason) == ("cancel", 2, "twice")
    assert LogEntry.objects.get().object_repr == "scheduled messages"


def test_deliver_the_selected_now(client):
    first, _second = schedule(2)
    assert confirm(client, "deliver-now", row=[str(first)]) == ["Scheduled messages that are due now: 1."]
    assert redriven() == [{"place": 0}]


def test_move_the_selected(client, settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    first, second = schedule(2)
    told = confirm(client, "move", row=[str(first)], time="2040-01-02T09:00")
    assert told == ["Scheduled messages moved to 2040-01-02 09:00:00+0900: 1."]
    assert ids(waiting(client)) == [second, first]
    at = datetime.datetime(2040, 1, 2, tzinfo=datetime.UTC).timestamp() * 1000
    assert OutboxMessage.objects.get(pk=first).deliver_at == at
    assert "That time is past: they will be delivered now." in ask(
        client, "move", row=[str(second)], time="2020-01-02T09:00"
    )
    for time, says in (("", "This field is required."), ("soon", "Enter a valid date/time.")):
        text = ask(client, "move", row=[str(second)], time=time)
        assert says in text
        assert 'name="confirmed"' not in text


def test_what_came_due_meanwhile_is_said(client):
    first, second = schedule(2)
    OutboxMessage.objects.filter(pk=first).update(deliver_at=1)
    (told,) = confirm(client, "cancel", row=[str(first), str(second)])
    left = "Messages left as they are, because they came due or another transaction is changing them: 1."
    assert told == f"Scheduled messages cancelled: 1. {left}"
    for name in (scheduled_operations.Cancel.name, scheduled_operations.DeliverNow.name):
        text = ask(client, name, row=[str(first)])
        assert "because they came due or another transaction is changing them: 1." in text
        assert 'name="confirmed"' not in text
    row = waiting(client)["rows"][0]
    assert (row.message.outbox_id, row.left) == (first, "")


def test_a_look_at_named_letters_sees_those_alone(db):
    dead = dead_letters(3)
    session = Session(USING)
    found = letters.look(session, DeadLetterFilter("t_dlq", offsets=(dead[0], dead[2], 10**9)))
    assert found.offsets == (dead[2], dead[0])
    assert letters.look(session, DeadLetterFilter("other_dlq", offsets=tuple(dead))).offsets == ()
    assert letters.look(session, DeadLetterFilter("t_dlq"), newest=dead[1]).offsets == (dead[1], dead[0])
