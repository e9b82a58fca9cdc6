"""Enqueue jobs in the project of DJANGO_SETTINGS_MODULE, and print the seconds that it took, and those of CPU time.

python enqueue.py single|alone|bulk|preload COUNT KIND
python enqueue.py steady COUNT KIND RATE

``single``: one job per transaction. ``alone``: the same, outside of ``atomic()``. ``bulk``: the library's own bulk call
with 500 jobs per transaction. ``preload``: all jobs in one transaction, so that the idle workers see all jobs at once;
it prints the time of the COMMIT instead. ``steady``: one job per transaction, at a rate per second that does not depend
on the workers; it prints the number of each job and the time of its COMMIT.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from os import environ

import django

BULK = 500
TEXT = "x" * 180


def main() -> None:
    way, count, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    django.setup()
    from django.db import connection, transaction

    jobs = import_module(environ["DJANGO_SETTINGS_MODULE"].replace(".settings", ".jobs"))
    connection.ensure_connection()
    started, cpu = time.monotonic(), time.process_time()
    if way == "steady":
        began = time.time() + 0.5
        for n in range(count):
            time.sleep(max(0.0, began + n / float(sys.argv[4]) - time.time()))
            with transaction.atomic():
                jobs.enqueue({"n": n, "text": TEXT}, kind)
            print(n, time.time())
        return
    if way == "single":
        for n in range(count):
            with transaction.atomic():
                jobs.enqueue({"n": n, "text": TEXT}, kind)
    elif way == "alone":
        for n in range(count):
            jobs.enqueue({"n": n, "text": TEXT}, kind)
    elif way == "bulk":
        for first in range(0, count, BULK):
            numbers = range(first, min(first + BULK, count))
            with transaction.atomic():
                jobs.enqueue_many([{"n": n, "text": TEXT} for n in numbers], kind)
    else:
        payloads = [{"n": n, "text": TEXT} for n in range(count)]
        with transaction.atomic():
            if hasattr(jobs, "enqueue_many"):
                jobs.enqueue_many(payloads, kind)
            else:
                for payload in payloads:
                    jobs.enqueue(payload, kind)
        print(time.time())
        return
    print(time.monotonic() - started, time.process_time() - cpu)


if __name__ == "__main__":
    main()
