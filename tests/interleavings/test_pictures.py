"""Recorded outcomes hold what things mean, and statements what each server gets: without a server."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_mysqlqueue.exceptions import OperationRefused, StaleDelivery
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.operations.steps import Stopped
from tests.interleavings import pictures, results, statements
from tests.interleavings.pictures import FIRST_OFFSET, Names
from tests.support.internals import Action
from tests.support.tables import Logged, Tables

pytestmark = [pytest.mark.own_server, pytest.mark.any_engine]

NAMES = Names(Tables(log={FIRST_OFFSET + 1: Logged(FIRST_OFFSET + 1, "t", "a", "a1", b'"a1"')}))


def test_an_error_is_its_kind_and_its_messages():
    texts = ("1000001 is settled already (17).", "Somebody has settled 1000001.")
    assert {results.error(OperationRefused(text), NAMES) for text in texts} == {"refused: impossible, about a1"}
    assert results.error(Stopped("Another seek has started."), NAMES) == "refused: stopped by another operation"
    assert results.error(StaleDelivery("It was revoked."), NAMES) == "refused: stale"
    assert results.error(ValueError("by mistake"), NAMES) == "refused: ValueError"


def test_an_error_of_a_command_has_the_kind_of_its_cause():
    with pytest.raises(CommandError) as caught:
        raise CommandError("Another seek has started.") from Stopped()
    assert results.error(caught.value, NAMES) == "refused: stopped by another operation"
    assert results.error(CommandError("Nothing was changed."), NAMES) == "refused: by the command"


def test_a_result_of_an_unknown_class_needs_a_meaning():
    with pytest.raises(TypeError, match="Add a function for object"):
        results.result([1, object()], NAMES)
    assert results.result([1, FIRST_OFFSET + 1, {"b": 1, "a": 2}, None], NAMES) == [1, "a1", ["a", "b"], None]


def test_each_action_and_each_operation_under_way_has_a_word():
    assert results.ACTIONS.keys() == {*Action}
    assert pictures.UNDER_WAY.keys() == {*ConsumerGroup.AfterSeek}


def test_what_one_server_gets_is_recorded_beside_the_other(tmp_path, monkeypatch):
    path = tmp_path / "statements.txt"
    for server, sent in (
        ("mysql", {"busy: beat": "3 | insert:subscriber_heartbeats commit", "busy: claim": "9 | lock:offsets"}),
        ("mariadb", {"busy: beat": "3 | insert:subscriber_heartbeats commit", "busy: claim": "8 | lock:offsets"}),
    ):
        monkeypatch.setattr(statements, "server", lambda server=server: server)
        statements.record(sent, path)
        assert statements.read(server, path) == sent
    assert path.read_text().splitlines()[len(statements.HEAD) :] == [
        "busy: beat | 3 | insert:subscriber_heartbeats commit",
        "busy: claim | 8 | lock:offsets | mariadb",
        "busy: claim | 9 | lock:offsets | mysql",
    ]
