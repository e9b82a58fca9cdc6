"""Publish messages from several connections at once, one by one, each outside of a transaction.

python publishers.py FIRST THREADS EACH

Each thread publishes EACH messages; their numbers begin with FIRST. Print "ready", wait for a line on standard input,
and print JSON: the milliseconds of each call, the errors, and the times of the beginning and of the end.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import django

TEXT = "x" * 180
KEYS = 100


def main() -> None:
    first, threads, each = map(int, sys.argv[1:])
    django.setup()
    from django.db import connection

    from django_mysqlqueue import publish

    took: list[float] = []
    errors: list[str] = []
    begin = threading.Event()
    connected = threading.Barrier(threads + 1)

    def work(place: int) -> None:
        connection.ensure_connection()
        connected.wait()
        begin.wait()
        for number in range(first + place * each, first + (place + 1) * each):
            payload: dict[str, Any] = {"n": number, "text": TEXT}
            at = time.perf_counter()
            try:
                publish("noop", payload, key=f"k{number % KEYS}")
            except Exception as error:  # noqa: BLE001  # the report has it
                errors.append(f"{type(error).__name__}: {error}")
            else:
                took.append(1000 * (time.perf_counter() - at))
        connection.close()

    started = [threading.Thread(target=work, args=(place,)) for place in range(threads)]
    for thread in started:
        thread.start()
    connected.wait()
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.time()
    begin.set()
    for thread in started:
        thread.join()
    print(json.dumps({"took": took, "errors": errors, "began": began, "ended": time.time()}))


if __name__ == "__main__":
    main()
