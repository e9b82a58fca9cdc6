"""A process that publishes as long as it is let, whatever becomes of the server.

    python -m tests.support.publisher NAME STOP_FILE

Each transaction publishes one number to two topics and notes it in a table of
the application: what is noted has been committed. A number is never used
again, since a COMMIT whose answer was lost may have happened.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import django

KEYS = 4


def main(name: str, stop: Path) -> None:
    django.setup()
    from django.apps import apps
    from django.db import Error, connection, transaction

    from django_mysqlqueue import publish

    # Of whichever app has the table in this project.
    (effect,) = (model for model in apps.get_models() if model._meta.db_table == "tests_app_effect")
    for number in itertools.count():
        if stop.exists():
            return
        key = f"{name}{number % KEYS}"
        try:
            with transaction.atomic():
                publish("p.plain", {"n": number}, key=key)
                publish("p.shared", {"n": number}, key=key)
                effect.objects.create(name=f"committed|{key}|0", value=number)
        except Error as error:
            print(f"{number}: {error}", flush=True)
            connection.close()
            time.sleep(0.1)
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
