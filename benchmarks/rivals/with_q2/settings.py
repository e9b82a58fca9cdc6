"""django-q2 with its ORM broker: one cluster, a pusher that fetches, two workers, a monitor that acks."""

from common import *  # noqa: F403

INSTALLED_APPS = ["django_q"]
Q_CLUSTER = {
    "name": "rivals",
    "orm": "default",
    "workers": 2,
    # Rows of one SELECT; each is still locked by an UPDATE of its own. The fastest of 1, 10, 100 and 1,000.
    "bulk": 100,
    # Jobs between pusher and workers: never the bottleneck.
    "queue_limit": 1000,
    # No row for each result, which three more statements would write: the ack alone is left.
    "save_limit": -1,
    # A worker that ends after 500 jobs, as by default, is only noticed by the next guard cycle.
    "recycle": 10_000_000,
    # Above any run's length: a second delivery of a job would be measured as work.
    "retry": 3600,
    "timeout": 600,
    "poll": 0.1,
    "scheduler": False,
    "log_level": "WARNING",
}
