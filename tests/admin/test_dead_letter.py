"""The dashboard's page of a dead letter."""

from __future__ import annotations

import re
from html import unescape

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.operations import redriving
from tests.support.dashboard import HOSTILE, ROOT, page
from tests.support.dead_letter_pages import ask, fail_with, listed, offsets, star
from tests.support.harness import USING, sequence
from tests.support.internals import DeadLetterFilter
from tests.support.scenarios import dead_letters, offsets_of

pytestmark = pytest.mark.any_engine


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
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor="ada")
    text = page(client, "deadletter", offset=offset)
    assert "no dead letter at offset" in text
    assert "not in the log (not yet" in text
    sequence()
    (event,) = client.get(f"{ROOT}deadletter/", {"offset": offset}).context["events"]
    sent = QueueMessage.objects.get(target_group="g")
    assert (event.delivery.outcome, event.delivery.by) == ("redriven", "ada")
    assert event.link.endswith(f"message/?offset={sent.offset}")
    assert sent.message_id in page(client, "deadletter", offset=offset)


def test_a_discarded_letter_shows_why(client):
    (offset,) = dead_letters(1)
    redriving.discard_all(USING, DeadLetterFilter("t_dlq"), actor="ada", reason="of a test")
    text = page(client, "deadletter", offset=offset)
    assert "discarded" in text
    assert "of a test" in text


@pytest.mark.parametrize(("query", "status"), [({}, 400), ({"offset": "x"}, 400), ({"offset": "77"}, 200)])
def test_a_letter_that_is_none(client, query, status):
    text = page(client, "deadletter", status, **query)
    assert ("never existed" in text) == (status == 200)


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
    assert "too long to redact" in text
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
        assert "To filter by error text" in page(user, "deadletters", 403, error=guess)
        for name in ("redrive", "discard"):
            for answer in (
                user.get(f"{ROOT}do/{name}/", {**wanted, "error": guess}),
                user.post(f"{ROOT}do/{name}/", {**wanted, "error": guess, "asked": "yes"}),
                user.post(f"{ROOT}do/{name}/", {**wanted, "error": guess, "confirmed": "yes", "previewed": "0"}),
            ):
                text = unescape(answer.content.decode())
                assert answer.status_code == 403
                assert "To filter by error text" in text
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
