"""What a project's own tests do with django_mysqlqueue.testing, on Django's runner and its TestCases."""

import asyncio
import datetime
import functools
import os
import re
import unittest
from pathlib import Path
from unittest import mock

from django.db import connection, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, TransactionTestCase, override_settings
from django.utils import timezone, translation

from django_mysqlqueue import InvalidMessage, QueueError, SubscriberError, apublish, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, OutboxMessage, PartitionLease, SubscriberHeartbeat
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.runtime.inline import InlineSubscriber, deliver_eagerly
from django_mysqlqueue.service import wakeups
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.testing import Published, deliver_all, delivery, published
from tests.user_project.shop.models import Invoice, Mail
from tests.user_project.shop.subscribers import act, confirm


def texts():
    return list(Mail.objects.order_by("id").values_list("text", flat=True))


class WhatWasPublished(TestCase):
    def test_what_was_published_in_order(self):
        when = timezone.now() + datetime.timedelta(hours=1)
        publish("orders", {"order": 1}, key="a", id="one", metadata={"from": "web"})
        publish("invoices", b"raw", id="two")
        publish("orders", {"order": 2}, key="b", deliver_at=when)
        first, second, third = published()
        metadata = {"from": "web", "content_type": "application/json"}
        self.assertEqual(first, Published("orders", "a", "one", {"order": 1}, metadata, None, "", ""))
        self.assertEqual((second.topic, second.key, second.payload), ("invoices", None, b"raw"))
        self.assertLess(abs(third.deliver_at - when), datetime.timedelta(milliseconds=2))
        self.assertEqual([message.key for message in published("orders")], ["a", "b"])
        self.assertEqual(published("none"), [])

    @override_settings(MYSQLQUEUE={"TOPICS": {"orders": {"PARTITIONS": 3}}})
    def test_keys_that_were_hashed(self):
        publish("orders", 1, key="customer 7")
        self.assertEqual(published()[0].key, "customer 7")

    def test_a_rollback_takes_it_back(self):
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            publish("orders", 1)
            1 / 0  # noqa: B018
        self.assertEqual(published(), [])

    def test_it_stays_after_delivery(self):
        publish("orders", {"order": 1})
        deliver_all()
        self.assertEqual([message.topic for message in published()], ["orders", "invoices"])


class Delivered(TestCase):
    def test_everything_and_what_follows(self):
        publish_many("orders", ({"order": number} for number in range(3)))
        self.assertEqual(texts(), [])
        delivered = deliver_all()
        self.assertEqual(sorted(Invoice.objects.values_list("order", flat=True)), [0, 1, 2])
        self.assertEqual(len([text for text in texts() if text.startswith("Thank you")]), 3)
        self.assertIn("archived [0, 1, 2]", texts())
        self.assertEqual({one.group for one in delivered}, {"billing", "mail", "archive"})
        self.assertEqual({one.outcome for one in delivered}, {"acked"})
        self.assertEqual(len(delivered), 9)
        self.assertEqual(deliver_all(), [])
        self.assertFalse(DeliveryState.objects.exists())

    def test_async_handlers(self):
        publish("reminders", 1)
        deliver_all()
        self.assertEqual(texts(), ["reminder 1"])

    def test_a_handlers_exception_is_raised(self):
        publish("orders", {"order": 1, "bounces": True})
        with self.assertRaisesMessage(ValueError, "no such address"):
            deliver_all(groups=["mail"])
        with self.assertRaisesMessage(ValueError, "no such address"):
            deliver_all(groups=["mail"])
        self.assertEqual(DeliveryState.objects.get(consumer_group="mail").retry_count, 2)

    def test_or_it_is_retried_until_the_dlq(self):
        publish("orders", {"order": 1, "bounces": True})
        delivered = deliver_all(raise_exceptions=False)
        failed = [(one.attempt, one.outcome) for one in delivered if one.group == "mail"]
        self.assertEqual(failed, [(1, "failed"), (2, "failed"), (3, "dead_lettered")])
        self.assertTrue(all("no such address" in one.error for one in delivered if one.group == "mail"))
        (dead,) = published("orders_dlq")
        self.assertEqual((dead.payload, dead.failed_group), ({"order": 1, "bounces": True}, "mail"))
        self.assertIn("ValueError: no such address", dead.last_error)
        self.assertNotIn("orders_dlq", [message.topic for message in published()])
        self.assertEqual(deliver_all(), [])

    def test_backoffs_are_not_waited_for(self):
        publish("actions", "late")
        self.assertEqual([(one.attempt, one.outcome) for one in deliver_all()], [(1, "failed"), (2, "acked")])

    def test_snoozed_ones_wait_for_advance(self):
        publish("actions", "snooze")
        self.assertEqual([one.outcome for one in deliver_all()], ["snoozed"])
        self.assertEqual(deliver_all(), [])
        self.assertEqual(deliver_all(advance=1800), [])
        self.assertEqual([one.outcome for one in deliver_all(advance=1801)], ["acked"])

    def test_scheduled_ones_wait_for_advance(self):
        publish("reminders", "second", delay=7200)
        publish("reminders", "first", delay=datetime.timedelta(hours=1))
        self.assertEqual(deliver_all(), [])
        self.assertEqual([one.payload for one in deliver_all(advance=datetime.timedelta(hours=1))], ["first"])
        self.assertEqual([one.payload for one in deliver_all(advance=3600)], ["second"])
        with self.assertRaisesMessage(InvalidMessage, "advance -1"):
            deliver_all(advance=-1)

    def test_rejected(self):
        publish("actions", "reject")
        publish("atomic", "reject")
        self.assertEqual([(one.outcome, one.error) for one in deliver_all()], [("dead_lettered", "not for us")] * 2)
        self.assertEqual(published("actions_dlq")[0].last_error, "not for us")
        self.assertEqual(texts(), ["atomic 1"])

    def test_atomic_handlers_roll_back_to_where_they_began(self):
        Mail.objects.create(text="before")
        publish("atomic", "raise")
        deliver_all(raise_exceptions=False)
        self.assertEqual(texts(), ["before"])
        publish("atomic", "fine")
        deliver_all()
        self.assertEqual(texts(), ["before", "atomic 1"])

    def test_a_database_error_does_not_break_the_test(self):
        publish("actions", "duplicate")
        deliver_all(raise_exceptions=False)
        self.assertTrue(published("actions_dlq"))
        self.assertEqual(Mail.objects.count(), 0)
        with self.assertRaises(Exception):  # noqa: B017
            publish("actions", "duplicate")
            deliver_all()
        self.assertEqual(Mail.objects.count(), 0)

    def test_acks_follow_the_same_rules_as_without_the_tests_transaction(self):
        publish("actions", "ack inside")
        self.assertEqual([one.outcome for one in deliver_all()], ["acked"])
        publish("actions", "ack then raise")
        delivered = deliver_all(raise_exceptions=False)
        self.assertEqual([one.outcome for one in delivered], [*["failed"] * 3, "dead_lettered"])
        self.assertEqual(texts(), ["inside"])

    def test_groups(self):
        publish("orders", {"order": 1})
        self.assertEqual({one.group for one in deliver_all(groups=["billing"])}, {"billing"})
        self.assertEqual({one.group for one in deliver_all()}, {"mail", "archive"})
        with self.assertRaisesMessage(SubscriberError, "groups=['nobody']"):
            deliver_all(groups=["nobody"])

    def test_without_end(self):
        publish("actions", "again")
        subscriber = InlineSubscriber("default", registry.handlers(), get_settings())
        with self.assertRaisesMessage(QueueError, "Stopped after"):
            subscriber.run(ignore_backoff=True, stop_at_error=True, most=50)

    def test_on_commit_hooks_of_handlers(self):
        publish("orders", {"order": 1})
        with self.captureOnCommitCallbacks(execute=True):
            deliver_all()
        self.assertIn("committed", texts())

    def test_nothing_is_left_behind(self):
        publish("orders", {"order": 1})
        deliver_all()
        self.assertFalse(PartitionLease.objects.exclude(leased_by="").exists())
        self.assertTrue(connection.in_atomic_block)


class HandlersAlone(TestCase):
    def test_a_delivery(self):
        made = delivery({"order": 7}, key="ada", metadata={"from": "web"}, attempt=2)
        self.assertEqual((made.payload, made.key, made.attempt), ({"order": 7}, "ada", 2))
        self.assertEqual(made.metadata["from"], "web")
        self.assertIsNone(made.outcome)
        confirm(made)
        self.assertEqual(texts(), ["Thank you for order 7"])

    def test_its_outcome(self):
        made = delivery("reject")
        act(made)
        self.assertEqual(made.outcome, "dead_lettered")
        made = delivery("late")
        act(made)
        self.assertEqual(made.outcome, "failed")
        with self.assertRaises(InvalidMessage):
            delivery(object())

    def test_what_a_handler_swallows_stays_as_in_production(self):
        publish("actions", "swallow")
        self.assertEqual([one.outcome for one in deliver_all()], ["acked"])
        self.assertEqual(texts(), ["kept"])

    def test_a_handler_that_goes_on_after_an_error_is_told_what_to_do(self):
        Invoice.objects.create(order=1)
        publish("actions", "catch")
        with self.assertRaises(TransactionManagementError) as raised:
            deliver_all()
        self.assertIn("tests.user_project.shop.subscribers.act: it continues after", str(raised.exception))
        self.assertIn("`with transaction.atomic():` block of its own", str(raised.exception))
        self.assertIsInstance(raised.exception.__cause__, TransactionManagementError)
        self.assertEqual(texts(), [], "the test's transaction can be used")
        with self.assertLogs("django_mysqlqueue"):
            delivered = deliver_all(raise_exceptions=False)
        self.assertIn("TransactionTestCase", delivered[-1].error)
        self.assertEqual(delivered[-1].outcome, "dead_lettered")

    def test_the_example_of_the_documentation(self):
        """``docs/howto/test.md``: the savepoint keeps the test's transaction in order."""
        page = (Path(__file__).parents[3] / "docs" / "howto" / "test.md").read_text()
        (example,) = (one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def make_invoice" in one)
        with mock.patch.object(registry, "_declared", []):
            exec(example.replace("orders.models", "tests.user_project.shop.models"), {"__name__": "example"})  # noqa: S102
            publish_many("orders", ({"order": order} for order in (1, 1, 2)))
            self.assertEqual([one.outcome for one in deliver_all()], ["acked"] * 3)
        self.assertEqual(list(Invoice.objects.order_by("order").values_list("order", flat=True)), [1, 2])

    def test_nothing_leaks_from_one_message_to_the_next(self):
        publish("actions", "activate")
        deliver_all()
        self.assertNotEqual(translation.get_language(), "de")


class Prepared(TestCase):
    @classmethod
    def setUpTestData(cls):
        publish("orders", {"order": 1})

    def test_once(self):
        deliver_all()
        self.assertEqual(Invoice.objects.count(), 1)

    def test_and_again(self):
        deliver_all()
        self.assertEqual(Invoice.objects.count(), 1)


@override_settings(MYSQLQUEUE={"EAGER": True})
class Eager(TestCase):
    def test_at_once(self):
        publish("reminders", 1)
        self.assertEqual(texts(), ["reminder 1"])
        publish_many("reminders", [2, 3])
        self.assertEqual(sorted(texts()), ["reminder 1", "reminder 2", "reminder 3"])

    def test_what_follows(self):
        publish("orders", {"order": 1})
        self.assertIn("archived [1]", texts())

    def test_when_it_commits(self):
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            publish("reminders", 1)
            publish("reminders", 2)
            self.assertEqual(texts(), [])
        self.assertEqual(sorted(texts()), ["reminder 1", "reminder 2"])

    def test_an_exception_reaches_the_publisher_after_all_had_their_turn(self):
        with self.assertRaisesMessage(ValueError, "no such address"):
            publish("orders", {"order": 1, "bounces": True})
        self.assertEqual(Invoice.objects.count(), 1)
        publish("reminders", 1)
        self.assertIn("reminder 1", texts())

    def test_scheduled_ones_wait(self):
        publish("reminders", 1, delay=60)
        self.assertEqual(texts(), [])


@override_settings(MYSQLQUEUE={"EAGER": True})
class EagerOften(TestCase):
    def test_it_leaves_nothing_behind(self):
        for number in range(5):
            publish("reminders", number)
        self.assertFalse(SubscriberHeartbeat.objects.exists())
        self.assertEqual(len(texts()), 5)

    def test_a_handler_that_publishes(self):
        """What is published meanwhile is delivered by the same pass, not by one inside it."""
        publish("actions", "publish and look")
        self.assertEqual(texts(), ["so far 0", "reminder 1"])

    def test_a_handler_that_publishes_for_itself(self):
        eager = functools.partial(deliver_eagerly, most=20)
        with (
            mock.patch.object(wakeups, "eager", eager),
            self.assertRaisesMessage(QueueError, "Stopped after"),
        ):
            publish("actions", "again")


@override_settings(MYSQLQUEUE={"TOPICS": {"invoices": {"DATABASE": "second"}, "reminders": {"DATABASE": "second"}}})
class SeveralDatabases(TestCase):
    databases = {"default", "second"}

    def test_handlers_publish_to_each_others_databases(self):
        publish_many("orders", ({"order": number} for number in range(3)))
        with mock.patch("tests.user_project.shop.subscribers.publish", publish_anyway):
            delivered = deliver_all()
        self.assertEqual({one.group for one in delivered}, {"billing", "mail", "archive"})
        self.assertEqual(len(delivered), 9)
        self.assertIn("archived [0, 1, 2]", texts())
        self.assertEqual(deliver_all(), [])

    def test_what_was_published_where(self):
        publish("reminders", 1)
        publish("orders", {"order": 1})
        self.assertEqual([one.topic for one in published()], ["orders", "reminders"])
        self.assertEqual([one.payload for one in published("reminders")], [1])
        self.assertEqual(published("reminders", using="default"), [])
        self.assertEqual([one.topic for one in published(using="second")], ["reminders"])

    def test_one_database_only(self):
        publish("reminders", 1)
        publish("orders", {"order": 1})
        self.assertEqual([one.topic for one in deliver_all(using="second")], ["reminders"])
        self.assertEqual([one.topic for one in deliver_all(using="default", groups=["mail"])], ["orders"])

    def test_time_moves_everywhere(self):
        publish("reminders", 1, delay=60)
        self.assertEqual(deliver_all(), [])
        self.assertEqual([one.topic for one in deliver_all(advance=61)], ["reminders"])

    def test_delivery_names_the_database_of_its_topic(self):
        self.assertEqual(delivery(topic="reminders")._using, "second")


def publish_anyway(*args, **options):
    """As a handler that accepts the risk: the transaction of an atomic one is on the database of its topic."""
    return publish(*args, on_mismatch="commit_now", **options)


@override_settings(MYSQLQUEUE={"TOPICS": {"reminders": {"DATABASE": "second"}}})
class ForbiddenDatabase(TestCase):
    def test_the_error_names_it(self):
        self.assertEqual(published("orders"), [])
        for call in (deliver_all, published, lambda: published("reminders"), lambda: publish("reminders", 1)):
            with self.assertRaisesRegex(AssertionError, r"'second' are not allowed.*Add 'second' to .*databases"):
                call()
        self.assertEqual(deliver_all(using="default"), [])


class Committing(TransactionTestCase):
    def test_deliver_all(self):
        ConsumerGroup.objects.all().delete()
        publish("orders", {"order": 1})
        deliver_all()
        self.assertEqual(Invoice.objects.count(), 1)
        self.assertIn("committed", texts())
        self.assertFalse(PartitionLease.objects.exclude(leased_by="").exists())
        self.assertEqual(ConsumerGroup.objects.count(), 8)

    def test_handlers_run_outside_any_transaction(self):
        publish("actions", "isolation")
        with self.assertRaises(AssertionError):
            deliver_all()

    def test_a_handler_goes_on_after_an_error_that_it_has_caught(self):
        Invoice.objects.create(order=1)
        publish("actions", "catch")
        self.assertEqual([one.outcome for one in deliver_all()], ["acked"])
        self.assertEqual(texts(), ["went on"])

    @override_settings(MYSQLQUEUE={"EAGER": True})
    def test_eager(self):
        with transaction.atomic():
            publish("reminders", 1)
            self.assertEqual(texts(), [])
        self.assertEqual(texts(), ["reminder 1"])
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            publish("reminders", 2)
            1 / 0  # noqa: B018
        self.assertEqual(texts(), ["reminder 1"])

    @unittest.skipIf(not os.environ.get("DATABASE_URL"), "another thread has another database, where that is in memory")
    @override_settings(MYSQLQUEUE={"EAGER": True})
    def test_eager_in_async_code(self):
        asyncio.run(apublish("reminders", 1))
        self.assertEqual(texts(), ["reminder 1"])

    def test_the_queue_outlives_a_flush(self):
        self.assertFalse(OutboxMessage.objects.exists())
        publish("reminders", 1)
        deliver_all()
        self.assertEqual(texts(), ["reminder 1"])
