"""The ceiling of ``atomic=True``: Django transactions with one updated and one deleted row.

python bare.py FIRST COUNT

Delete the jobs FIRST to FIRST + COUNT - 1, which must exist. Print "ready", wait for a line on standard input, and
print the times of the beginning and of the end and the CPU seconds in between.
"""

from __future__ import annotations

import sys
import time

import django


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    django.setup()
    from django.db import connection, transaction
    from django.db.models import F
    from with_mysqlqueue.models import Account

    connection.ensure_connection()
    print("ready", flush=True)
    sys.stdin.readline()
    began, cpu = time.time(), time.process_time()
    for number in range(first, first + count):
        with transaction.atomic(), connection.cursor() as cursor:
            Account.objects.filter(pk=number).update(balance=F("balance") + 1)
            cursor.execute("DELETE FROM with_mysqlqueue_job WHERE id = %s", [number])
            if cursor.rowcount != 1:
                raise SystemExit(f"job {number} does not exist")
    print(began, time.time(), time.process_time() - cpu)


if __name__ == "__main__":
    main()
