"""A file whose age tells a liveness probe whether the subscriber makes progress."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.runtime.log import event


class HeartbeatFile:
    """A file that is renewed about every second while there is progress, whether or not the database is up.

    Progress means that the poller's loop runs: an error that it survives and retries is progress, a hang longer than
    ``LEASE_DURATION`` is not. So a probe restarts a process that hangs, but not one that waits for its database.
    """

    def __init__(self, path: str) -> None:
        """Create the file.

        Raises:
            SubscriberError: the file cannot be written.
        """
        self._path = Path(path).absolute()
        try:
            self._path.touch()
        except OSError as error:
            raise SubscriberError(f"The heartbeat file {path} cannot be written: {error.strerror}.") from error
        self._failed = False

    def touch(self) -> None:
        """Renew the file. A failure is logged once; the probe notices it too."""
        try:
            self._path.touch()
        except OSError as error:
            if not self._failed:
                event(logging.ERROR, "heartbeat_file.failed", error=error)
            self._failed = True
        else:
            self._failed = False

    def remove(self) -> None:
        """Delete the file, if it is there."""
        with contextlib.suppress(OSError):
            self._path.unlink()
