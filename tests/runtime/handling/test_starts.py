"""The limit on the deliveries of a process, which has an inbox for each of its databases."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.harness import handler
from tests.support.inbox import BODY
from tests.support.internals import Claimed, Held, Inbox, Starts

pytestmark = pytest.mark.any_engine


class Slow(Starts):
    """Between the look at the count and the start there is time for another inbox."""

    @property
    def left(self):
        found = self.number
        time.sleep(0.05)
        return found

    @left.setter
    def left(self, number):
        self.number = number


def test_two_inboxes_do_not_both_start_the_last_one():
    one, starts, taken = handler(), Slow(most=1), []
    inboxes = [Inbox([one.ref], leases_good=lambda: True, starts=starts) for _ in range(2)]
    for inbox in inboxes:
        inbox.put([Held(Claimed(one.ref, "k", 1, 1, 1, suspect=False, size=1), body=BODY, handler=one)])
    threads = [
        threading.Thread(target=lambda inbox=inbox: taken.append(inbox.take(None, wait=False))) for inbox in inboxes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(batch is not None for batch in taken) == 1


def test_without_a_limit_each_inbox_has_its_own_lock():
    starts = Starts()
    assert starts.lock() is not starts.lock()
