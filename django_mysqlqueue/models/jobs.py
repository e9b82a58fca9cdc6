"""The results of jobs, the tasks of ``django.tasks`` that the queue runs."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.fields import BytewiseCharField, BytewiseTextField, NowMilliseconds
from django_mysqlqueue.limits import JOB_PATH_LENGTH, KEY_LENGTH, NAME_LENGTH
from django_mysqlqueue.managers import QueueManager


class JobResult(models.Model):
    """A job: what was enqueued, and what has become of it. Its message carries its id."""

    class Status(models.TextChoices):
        """The statuses of ``django.tasks``."""

        READY = "READY", _("ready")
        RUNNING = "RUNNING", _("running")
        FAILED = "FAILED", _("failed")
        SUCCESSFUL = "SUCCESSFUL", _("successful")

    id = BytewiseCharField(primary_key=True, max_length=KEY_LENGTH)
    backend = BytewiseCharField(_("backend"), max_length=NAME_LENGTH, help_text=_("alias in TASKS"))
    queue_name = BytewiseCharField(_("queue"), max_length=NAME_LENGTH)
    task_path = BytewiseCharField(_("task"), max_length=JOB_PATH_LENGTH)
    arguments = BytewiseTextField(_("arguments"), help_text=_("JSON with args and kwargs"))
    priority = models.SmallIntegerField(_("priority"), db_default=0)
    run_after = models.BigIntegerField(_("run after"), db_default=0, help_text=_("0: at once"))
    status = BytewiseCharField(_("status"), max_length=10, choices=Status.choices, db_default="READY")
    enqueued_at = models.BigIntegerField(_("enqueued at"), db_default=NowMilliseconds())
    started_at = models.BigIntegerField(_("started at"), db_default=0, help_text=_("of the first attempt; 0: never"))
    last_attempted_at = models.BigIntegerField(_("last attempted at"), db_default=0, help_text=_("0: never"))
    finished_at = models.BigIntegerField(_("finished at"), db_default=0, help_text=_("0: not yet"))
    return_value = BytewiseTextField(
        _("return value"), db_default=models.Value(""), blank=True, help_text=_("JSON; empty: none")
    )
    errors = BytewiseTextField(
        _("errors"), db_default=models.Value(""), blank=True, help_text=_("of all attempts: a JSON object in each line")
    )
    worker_ids = BytewiseTextField(
        _("workers"), db_default=models.Value(""), blank=True, help_text=_("subscribers that had it: one in each line")
    )

    objects = QueueManager["JobResult"]()

    class Meta:
        db_table = "queue_job_results"
        verbose_name = _("job result")
        verbose_name_plural = _("job results")
        indexes = [
            models.Index(fields=["status", "finished_at"], name="queue_job_results_status"),
            models.Index(fields=["task_path", "enqueued_at"], name="queue_job_results_task"),
        ]

    def __str__(self) -> str:
        return f"{self.task_path} {self.id}"
