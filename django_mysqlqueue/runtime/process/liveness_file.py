"""A file whose age tells a liveness probe whether the subscriber makes progress."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.runtime.log import event


class HeartbeatFile:
    """Renewed about every second while there is progress, whether the database is up or not.

    Progress means that the poller goes round its loop: an error that it survives
    and tries again is progress, a hang longer than ``LEASE_DURATION`` is not. So
    a probe restarts what is stuck and leaves alone what waits for its database.
    """

    def __init__(self, path: str) -> None:
        """Creates the file.

        Raises:
            SubscriberError: it cannot be written.
        """
        self._path = Path(path).absolute()
        try:
            self._path.touch()
        except OSError as error:
            raise SubscriberError(f"The heartbeat file {path} cannot be written: {error.strerror}.") from error
        self._failed = False

    def touch(self) -> None:
        """Renews it; a failure is logged once, and the probe will notice."""
        try:
            self._path.touch()
        except OSError as error:
            if not self._failed:
                event(logging.ERROR, "heartbeat_file.failed", error=error)
            self._failed = True
        else:
            self._failed = False

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
