"""``db_worker`` with this package's subscriber. Options that it does not have are accepted and ignored."""

from __future__ import annotations

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.tasks import task_backends

from django_mysqlqueue.tasks import MySQLQueueBackend


class Command(BaseCommand):
    """The command."""

    def add_arguments(self, parser):
        parser.add_argument("--queue-name", default="default")
        parser.add_argument("--exclude-queues", default="")
        parser.add_argument("--batch", action="store_true")
        parser.add_argument("--backend", default="default", dest="backend_name")
        parser.add_argument("--max-tasks", type=int)
        parser.add_argument("--interval", type=float)
        parser.add_argument("--worker-id")
        parser.add_argument("--no-startup-delay", action="store_false", dest="startup_delay")

    def handle(self, **options):
        backend = task_backends[options["backend_name"]]
        if not isinstance(backend, MySQLQueueBackend):
            return
        everything = options["queue_name"] == "*"
        if options["exclude_queues"] and not everything:
            raise CommandError("--exclude-queues can only be used with --queue-name=*")
        names = backend.queues if everything else options["queue_name"].split(",")
        chosen = [f"jobs.{name}" for name in names if name not in options["exclude_queues"].split(",")]
        call_command(
            "runsubscriber",
            group=["jobs"],
            topic=sorted(chosen),
            drain=options["batch"],
            threads=1,
            max_messages=options["max_tasks"],
            verbosity=options["verbosity"],
        )
        if options["max_tasks"]:
            self.stdout.write(f"Run maximum tasks ({options['max_tasks']})")
        self.stdout.write("exiting gracefully")
