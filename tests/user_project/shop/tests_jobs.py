"""What a project's own tests do with jobs, on Django's runner and its TestCases."""

import asyncio
import datetime
import traceback
from unittest import mock

import freezegun
import time_machine
from django.db import transaction
from django.test import TestCase, TransactionTestCase
from django.utils import timezone

from django_mysqlqueue import SubscriberError, publish
from django_mysqlqueue.models import JobResult, OutboxMessage, QueueMessage
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.tasks import JobCancelled, JobContext
from django_mysqlqueue.testing import (
    QueueTestMixin,
    clear_queue,
    deliver_all,
    enqueued,
    job_context,
    published,
    python_clock,
)
from tests.user_project.shop.models import Invoice, Mail
from tests.user_project.shop.tasks import charge, count, count_all, export, send, total


def texts():
    return list(Mail.objects.order_by("id").values_list("text", flat=True))


class WhatWasEnqueued(TestCase):
    def test_the_jobs_of_a_task_in_order(self):
        later = timezone.now() + datetime.timedelta(hours=1)
        charge.enqueue(2, currency="usd")
        send.enqueue("a")
        charge.using(priority=10, run_after=later).enqueue(1)
        first, second = enqueued(charge)
        self.assertEqual((first.args, first.kwargs, first.status), ([2], {"currency": "usd"}, "READY"))
        self.assertEqual((second.args, second.task.priority), ([1], 10))
        self.assertLess(abs(second.task.run_after - later), datetime.timedelta(milliseconds=2))
        self.assertEqual([one.task.func for one in enqueued()], [charge.func, send.func, charge.func])
        self.assertEqual(enqueued(export), [])
        self.assertEqual([one.args for one in enqueued(send, using="default")], [["a"]])

    def test_their_outcomes(self):
        charge.enqueue(7)
        charge.enqueue(-1)
        with self.assertLogs("django_mysqlqueue"):
            deliver_all(raise_exceptions=False)
        first, second = enqueued(charge)
        self.assertEqual((first.status, first.return_value), ("SUCCESSFUL", "7 eur"))
        self.assertEqual((second.status, len(second.errors)), ("FAILED", 3))
        self.assertIn("no such order", second.errors[-1].traceback)

    def test_a_chain_with_the_stages_that_wait(self):
        count_all("ab", "c")
        self.assertEqual([one.args for one in enqueued()], [["ab"], ["c"], []])
        deliver_all()
        self.assertEqual([one.return_value for one in enqueued(total)], [3])

    def test_a_rollback_takes_it_back(self):
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            send.enqueue("a")
            1 / 0  # noqa: B018
        self.assertEqual(enqueued(), [])


class Delivering(TestCase):
    def test_the_jobs_of_some_tasks(self):
        publish("reminders", 1)
        for number in range(120):  # More than one claim takes.
            send.enqueue(f"mail {number}")
        charge.enqueue(1)
        count.enqueue("a")
        self.assertEqual([one.payload["args"] for one in deliver_all(tasks=[charge])], [[1]])
        self.assertEqual({one.status for one in (*enqueued(send), *enqueued(count))}, {"READY"})
        self.assertEqual({tuple(one.worker_ids) for one in enqueued(send)}, {()})
        self.assertEqual(texts(), [])
        self.assertEqual(deliver_all(tasks=[charge, export]), [])
        self.assertEqual(len(deliver_all(tasks=[count], groups=["mail"])), 2)
        self.assertEqual(texts(), ["reminder 1"])
        self.assertEqual({one.attempt for one in deliver_all()}, {1})
        self.assertEqual(texts(), ["reminder 1", *(f"mail {number}" for number in range(120))])

    def test_other_jobs_have_not_begun(self):
        """A unique job that waits for its first attempt holds its key."""
        waiting = export.enqueue(1)
        charge.enqueue(1)
        deliver_all(tasks=[charge])
        (found,) = enqueued(export)
        self.assertIsNone(found.started_at)
        self.assertEqual(export.enqueue(1).id, waiting.id)

    def test_what_they_enqueue_of_other_tasks_stays(self):
        charge.enqueue(1)
        with self.captureOnCommitCallbacks(execute=True):
            deliver_all(tasks=[charge])
        self.assertEqual(deliver_all(tasks=[charge]), [])
        self.assertEqual([one.status for one in enqueued(send)], ["READY"])
        deliver_all(tasks=[send])
        self.assertEqual(texts(), ["charged 1 eur"])

    def test_messages_that_are_not_jobs_stay(self):
        publish("jobs.default", ["no job"], id="one")
        publish("jobs.default", b"\xff", id="two")
        charge.enqueue(1)
        self.assertEqual([one.payload["args"] for one in deliver_all(tasks=[charge])], [[1]])

    def test_what_is_not_a_task_is_refused(self):
        for wrong in ("shop.tasks.charge", charge.func, charge.using(backend="default").func):
            with self.assertRaisesMessage(SubscriberError, "it is not a task of a MySQLQueueBackend"):
                deliver_all(tasks=[wrong])

    def test_an_exception_reaches_the_test_with_its_traceback(self):
        charge.enqueue(-1)
        frames = []
        with self.assertLogs("django_mysqlqueue"):
            try:
                deliver_all()
            except ValueError as error:
                frames = traceback.extract_tb(error.__traceback__)
        self.assertEqual((frames[-1].name, frames[-1].line), ("charge", 'raise ValueError("no such order")'))
        self.assertEqual([len(one.errors) for one in enqueued(charge)], [1])


class Clearing(TestCase):
    @classmethod
    def setUpTestData(cls):
        publish("orders", {"order": 1}, key="ada")
        export.enqueue(1)

    def test_what_fixtures_published_is_gone(self):
        clear_queue()
        self.assertEqual((published(), enqueued(), deliver_all()), ([], [], []))
        publish("orders", {"order": 2}, key="ada")
        export.enqueue(1)  # No job waits that it would be the same as.
        deliver_all()
        self.assertEqual(Invoice.objects.get().order, 2)
        self.assertEqual([one.status for one in enqueued(export)], ["SUCCESSFUL"])

    def test_it_is_there_again(self):
        deliver_all()
        self.assertEqual(Invoice.objects.get().order, 1)

    def test_what_waits_for_another_attempt_is_gone(self):
        publish("actions", "snooze", key="k")
        publish("reminders", "later", delay=60, coalesce="c")
        count_all("a", "b")
        self.assertIn("snoozed", [one.outcome for one in deliver_all()])
        clear_queue(using="default")
        self.assertFalse(QueueMessage.objects.exists() or OutboxMessage.objects.exists() or JobResult.objects.exists())
        publish("actions", "reject", key="k")
        publish("reminders", "new", coalesce="c")
        self.assertEqual({one.payload for one in deliver_all(advance=7200)}, {"reject", "new"})


class CallingATask(TestCase):
    databases = set()
    """A context needs none."""

    def test_with_an_attempt(self):
        self.assertEqual(export.call(job_context(export, attempt=3), 1), 3)
        self.assertIsInstance(job_context(export), JobContext)
        self.assertEqual(job_context(export).attempt, 1)

    def test_its_progress_is_recorded(self):
        context = job_context(export)
        export.call(context, 2)
        reports = [(one.done, one.total, one.message) for one in context.reports]
        self.assertEqual(reports, [(0, 2, "row 0"), (1, 2, "row 1")])
        with self.assertRaises(ValueError):
            context.progress(-1)
        self.assertEqual(len(context.reports), 2)

    def test_one_that_is_asked_to_stop(self):
        with self.assertRaises(JobCancelled):
            export.call(job_context(export, cancelled=True), 2)

    def test_with_results_of_the_stage_before(self):
        context = job_context(total, previous_results=[1, 2])
        self.assertEqual(asyncio.run(total.acall(context)), 3)
        self.assertEqual([one.status for one in context.previous_results()], ["SUCCESSFUL"] * 2)
        self.assertEqual(job_context(total).previous_results(), [])
        self.assertEqual(job_context(total, previous_results=[(1,)]).previous_results()[0].return_value, [1])

    def test_it_counts_as_failed_attempts(self):
        """As a subscriber sees it: none of the attempts before was lost."""
        context = job_context(export, attempt=3, stopping=True)
        self.assertEqual((context.attempt, context.losses, context.stopping), (3, 0, True))
        self.assertFalse(job_context(export).stopping)

    def test_it_records_what_a_task_asks_for(self):
        context = job_context(export)
        context.retry(60, reason="later")
        context.retry(datetime.timedelta(minutes=2))
        self.assertEqual(context.retries, [(60.0, "later"), (120.0, "")])

    def test_the_function_and_its_mock(self):
        with mock.patch("tests.user_project.shop.tests_jobs.charge") as mocked:
            charge.enqueue(7)
        mocked.enqueue.assert_called_once_with(7)


class WithTheMixin(QueueTestMixin, TestCase):
    @classmethod
    def setUpTestData(cls):
        publish("orders", {"order": 1}, key="ada")
        charge.enqueue(1)

    def test_fixtures_are_left_out(self):
        self.assertEqual(self.deliver_all(), [])
        charge.enqueue(2, currency="usd")
        self.assertEqual([one.topic for one in self.deliver_all()], ["jobs.default", "jobs.mail"])
        self.assertEqual(texts(), ["charged 2 usd"])

    def test_assertions(self):
        publish("reminders", {"a": [1]})
        charge.enqueue(2, currency="usd")
        self.assertPublished("reminders", {"a": [1]})
        self.assertEnqueued(charge, 2, currency="usd")
        with self.assertRaisesMessage(AssertionError, "published('reminders')"):
            self.assertPublished("reminders", {})
        with self.assertRaisesMessage(AssertionError, "enqueued(tests.user_project.shop.tasks.charge)"):
            self.assertEnqueued(charge, 2)
        with self.assertRaises(AssertionError):
            self.assertEnqueued(send, 2, currency="usd")

    def test_time_passes_once(self):
        publish("reminders", 1, delay=3600)
        publish("reminders", 2, delay=7200)
        self.assertEqual([one.payload for one in self.deliver_all(advance=3600)], [1])
        with self.assertRaisesMessage(SubscriberError, "nobody"):
            self.deliver_all(groups=["nobody"])


START = datetime.datetime(2031, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)


class Frozen(TestCase):
    """A clock of the future: by the database's, nothing would be due."""

    def check(self, advance):
        send.using(run_after=HOUR).enqueue("an hour later")
        send.using(run_after=START + 2 * HOUR).enqueue("two hours later")
        publish("reminders", 3, delay=3 * HOUR)
        publish("reminders", 4, expires_in=HOUR)
        charge.enqueue(1)
        self.assertEqual({one.deliver_at for one in published("jobs.mail")}, {START + HOUR, START + 2 * HOUR})
        self.assertEqual([one.outcome for one in deliver_all()], ["acked", "acked"])
        self.assertEqual([one.finished_at for one in enqueued(charge)], [START])
        advance(HOUR)
        self.assertEqual([one.payload["args"] for one in deliver_all()], [["an hour later"]])
        publish("reminders", 5, expires_in=HOUR)
        advance(2 * HOUR)
        outcomes = sorted((one.topic, one.outcome) for one in deliver_all())
        self.assertEqual(outcomes, [("jobs.mail", "acked"), ("reminders", "acked"), ("reminders", "expired")])
        self.assertEqual(enqueued(send)[-1].finished_at, START + 3 * HOUR)
        self.assertIn("reminder 3", texts())

    def test_with_time_machine(self):
        with time_machine.travel(START, tick=False) as clock, python_clock():
            self.check(clock.shift)

    def test_with_freezegun(self):
        with freezegun.freeze_time(START) as clock, python_clock():
            self.check(clock.tick)

    def test_it_ends(self):
        before = Session("default").dialect.now_ms
        with self.assertRaises(ZeroDivisionError), python_clock():
            self.assertNotEqual(Session("default").dialect.now_ms, before)
            1 / 0  # noqa: B018
        self.assertEqual(Session("default").dialect.now_ms, before)


class Committing(TransactionTestCase):
    def test_the_jobs_of_some_tasks(self):
        send.enqueue("a")
        charge.enqueue(1)
        self.assertEqual([one.outcome for one in deliver_all(tasks=[charge])], ["acked"])
        self.assertEqual([one.status for one in enqueued(send)], ["READY", "READY"])
        clear_queue()
        self.assertEqual(deliver_all(), [])
