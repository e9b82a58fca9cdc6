"""This package, with the settings that are fastest for it. The handlers are in ``subscribers``."""

from common import *  # noqa: F403

INSTALLED_APPS = ["django_mysqlqueue", "with_mysqlqueue"]

MYSQLQUEUE = {
    # A claim of 500 costs little more than one of 100.
    "CLAIM_SIZE": 500,
    "PREFETCH": 1000,
    # Atomic handlers wait for the disk, and more concurrent handlers share its flushes.
    "THREADS": 8,
}
