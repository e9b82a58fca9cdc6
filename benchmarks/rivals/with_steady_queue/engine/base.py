"""Django's backend for MySQL, with connections that survive Steady Queue.

Steady Queue closes all connections of a thread after each job, whatever CONN_MAX_AGE says: it expects a pool, which
Django has for PostgreSQL only. Connections of the main thread are closed as usual, since it forks.
"""

from __future__ import annotations

import threading

from django.db.backends.mysql import base


class DatabaseWrapper(base.DatabaseWrapper):
    def close(self) -> None:
        if threading.current_thread() is threading.main_thread():
            super().close()
