"""publish() beside a transaction on another database."""

from __future__ import annotations

import unittest

import pytest
from django.db import connection, connections, transaction
from django.test import TestCase

from django_mysqlqueue import InvalidMessage, TransactionMismatch, publish, publish_many
from django_mysqlqueue.models import OutboxMessage
from tests.support.harness import in_thread
from tests.support.publishing import committed, one_or_many, publish_one_of_many, rolled_back, stored


@one_or_many
def test_mismatch_is_refused(other, send):
    with transaction.atomic(using="other"):
        with pytest.raises(TransactionMismatch) as raised:
            send("t", 1)
        assert "'default'" in str(raised.value)
        assert "'other'" in str(raised.value)
        assert "on_mismatch='commit_now' or 'on_commit'" in str(raised.value)
    assert committed() == []


@one_or_many
def test_mismatch_with_autocommit_off(other, send):
    other.set_autocommit(False)
    try:
        with pytest.raises(TransactionMismatch):
            send("t", 1)
    finally:
        other.rollback()
        other.set_autocommit(True)
    send("t", 2)
    assert committed() == ["2"]


@one_or_many
def test_commit_now_stays_even_if_the_other_rolls_back(other, send):
    with rolled_back("other"):
        send("t", 1, on_mismatch="commit_now")
        assert committed() == ["1"]
    assert committed() == ["1"]


@one_or_many
def test_on_commit_waits_for_the_other(other, send):
    with transaction.atomic(using="other"):
        send("t", 1, on_mismatch="on_commit")
        assert stored() == []
    assert committed() == ["1"]


@one_or_many
def test_on_commit_goes_with_the_others_rollback(other, send):
    with rolled_back("other"):
        send("t", 1, on_mismatch="on_commit")
    with transaction.atomic(using="other"):
        with rolled_back("other"):
            send("t", 2, on_mismatch="on_commit")
        send("t", 3, on_mismatch="on_commit")
    assert committed() == ["3"]


@one_or_many
def test_on_commit_refuses_a_bad_message_at_once(other, send):
    """In the hook nobody could handle it any more."""
    with transaction.atomic(using="other"), pytest.raises(InvalidMessage):
        send("t", float("nan"), on_mismatch="on_commit")
    assert committed() == []


def test_on_commit_returns_what_it_will_publish(other):
    with transaction.atomic(using="other"):
        message_id = publish("t", 1, on_mismatch="on_commit")
        assert publish_many("t", iter([2, 3]), on_mismatch="on_commit") == 2
        assert publish_many("t", [], on_mismatch="on_commit") == 0
    assert committed() == ["1", "2", "3"]
    assert OutboxMessage.objects.first().message_id == message_id


@one_or_many
@pytest.mark.parametrize("on_mismatch", ["error", "commit_now", "on_commit"])
def test_no_mismatch_while_the_queues_transaction_is_open(other, send, on_mismatch):
    """It joins the queue's transaction, whatever was asked for in the other case."""
    for outer, inner in (("default", "other"), ("other", "default")):
        with rolled_back(outer), rolled_back(inner):
            send("t", 1, on_mismatch=on_mismatch)
            assert stored() == ["1"]
    assert committed() == []


@one_or_many
@pytest.mark.parametrize("on_mismatch", ["error", "commit_now", "on_commit"])
def test_no_mismatch_without_any_transaction(other, send, on_mismatch):
    send("t", 1, on_mismatch=on_mismatch)
    assert committed() == ["1"]


@one_or_many
def test_no_mismatch_with_autocommit_off_on_the_queue(other, autocommit_off, send):
    with transaction.atomic(using="other"):
        send("t", 1)
    assert committed() == []
    connection.commit()
    assert committed() == ["1"]


@one_or_many
def test_no_mismatch_in_the_others_on_commit_hook(other, send):
    with transaction.atomic(using="other"):
        transaction.on_commit(lambda: send("t", 1), using="other")
    assert committed() == ["1"]


@one_or_many
def test_a_transaction_of_another_thread_is_no_mismatch(other, send):
    with transaction.atomic(using="other"):
        in_thread(lambda: send("t", 1))
    assert committed() == ["1"]


@one_or_many
def test_unknown_on_mismatch(db, send):
    with pytest.raises(ValueError, match="on_mismatch='ignore': must be 'error', 'commit_now' or 'on_commit'"):
        send("t", 1, on_mismatch="ignore")
    assert committed() == []


@one_or_many
@pytest.mark.parametrize("name", ["using", "MYSQLQUEUE"])
def test_the_alias_given_decides_whose_transaction_counts(other, settings, send, name):
    """With the queue on ``other``, a transaction on ``default`` is the foreign one."""
    options = {}
    if name == "using":
        options["using"] = "other"
    else:
        settings.MYSQLQUEUE = {"DATABASE": "other"}
    with transaction.atomic(), pytest.raises(TransactionMismatch, match=r"'other', which has no .* but 'default' has"):
        send("t", 1, **options)


def test_the_blocks_of_testcase_do_not_count(db):
    """They wrap every test, on both databases; the user's own blocks inside count as always."""

    class Case(TestCase):
        databases = {"default", "other"}

        def runTest(self):  # noqa: N802
            assert connections["default"].in_atomic_block
            assert connections["other"].in_atomic_block
            publish("t", "bare")
            publish_many("t", ["many"])
            with transaction.atomic():
                publish("t", "joins")
            with transaction.atomic(using="other"):
                for send in (publish, publish_one_of_many):
                    with pytest.raises(TransactionMismatch):
                        send("t", "mismatch")
                publish("t", "now", on_mismatch="commit_now")
                with transaction.atomic():
                    publish("t", "both")
            with self.captureOnCommitCallbacks(using="other", execute=True), transaction.atomic(using="other"):
                publish("t", "hook", on_mismatch="on_commit")
            assert stored() == [f'"{name}"' for name in ("bare", "many", "joins", "now", "both", "hook")]

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)
    assert [text for _, text in result.errors + result.failures] == []
    assert result.testsRun == 1
    assert committed() == []
