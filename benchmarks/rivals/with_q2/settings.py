"""django-q2 with its ORM broker: one cluster, a pusher that fetches, two workers, a monitor that acks."""

from common import *  # noqa: F403

INSTALLED_APPS = ["django_q"]
Q_CLUSTER = {
    "name": "rivals",
    "orm": "default",
    "workers": 2,
    # Number of rows per SELECT. Each is still locked by its own UPDATE. 100 was the fastest of 1, 10, 100 and 1,000.
    "bulk": 100,
    # Jobs between pusher and workers. It is never the bottleneck.
    "queue_limit": 1000,
    # Store no results, which would take three more statements per job. Only the ack is left.
    "save_limit": -1,
    # Never restart workers. By default they exit after 500 jobs, which only the next guard cycle notices.
    "recycle": 10_000_000,
    # Longer than any run, because a second delivery of a job would be measured as work.
    "retry": 3600,
    "timeout": 600,
    "poll": 0.05,
    "scheduler": False,
    "log_level": "WARNING",
}
