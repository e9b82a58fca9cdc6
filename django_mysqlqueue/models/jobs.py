"""The results of jobs, the tasks of ``django.tasks`` that the queue runs, and recurring schedules."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.db.fields import BytewiseCharField, BytewiseTextField, NowMilliseconds
from django_mysqlqueue.db.sizes import JOB_PATH_LENGTH, PROGRESS_LENGTH
from django_mysqlqueue.db.tables import RESULTS, SCHEDULES, STAGES
from django_mysqlqueue.models.base import QueueModel
from django_mysqlqueue.names.ids import SCHEDULE_NAME_LENGTH, STAGE_LENGTH
from django_mysqlqueue.names.rules import KEY_LENGTH, NAME_LENGTH


class JobResult(QueueModel):
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
    progress = BytewiseCharField(
        _("progress"),
        max_length=PROGRESS_LENGTH,
        db_default=models.Value(""),
        blank=True,
        help_text=_("of the current or last attempt: JSON with done, total, message and at; empty: none"),
    )
    cancel_requested_at = models.BigIntegerField(
        _("cancel requested at"), db_default=0, help_text=_("of a running job; 0: never")
    )
    unique_key = models.CharField(  # noqa: DJ001  # The unique index ignores NULLs.
        _("unique key"),
        max_length=64,
        null=True,
        help_text=_("SHA-256 of what no other waiting job has; NULL from the first claim on"),
    )
    stage = BytewiseCharField(
        _("stage"), max_length=STAGE_LENGTH, db_default=models.Value(""), blank=True, help_text=_("of a chain, if any")
    )
    redriven_id = BytewiseCharField(
        _("redriven id"),
        max_length=KEY_LENGTH,
        db_default=models.Value(""),
        blank=True,
        help_text=_("of the message that the last redrive has published; empty: none"),
    )

    class Meta:
        db_table = RESULTS
        verbose_name = _("job result")
        verbose_name_plural = _("job results")
        indexes = [
            models.Index(fields=["status", "finished_at"], name="queue_job_results_status"),
            models.Index(fields=["task_path", "enqueued_at"], name="queue_job_results_task"),
        ]
        constraints = [models.UniqueConstraint(fields=["unique_key"], name="queue_job_results_unique")]

    def __str__(self) -> str:
        return f"{self.task_path} {self.id}"


class JobStage(QueueModel):
    """A stage of a chain of jobs. Its row is the lock under which the jobs of the stage after it are published."""

    id = BytewiseCharField(primary_key=True, max_length=STAGE_LENGTH)
    following = BytewiseCharField(
        _("following stage"),
        max_length=STAGE_LENGTH,
        db_default=models.Value(""),
        blank=True,
        help_text=_("empty: none"),
    )
    remaining = models.IntegerField(_("remaining"), help_text=_("number of its jobs that are not SUCCESSFUL yet"))
    kept = models.IntegerField(_("kept"), help_text=_("number of its jobs whose results were not deleted yet"))
    size = models.IntegerField(
        _("size"), help_text=_("number of its jobs; their ids are that of the stage and a number")
    )

    class Meta:
        db_table = STAGES
        verbose_name = _("stage of jobs")
        verbose_name_plural = _("stages of jobs")

    def __str__(self) -> str:
        return self.id


class Schedule(QueueModel):
    """A recurring schedule: what it publishes, and up to which time its ticks were decided."""

    name = BytewiseCharField(primary_key=True, max_length=SCHEDULE_NAME_LENGTH)
    definition = BytewiseTextField(_("definition"), help_text=_("JSON with all that a tick needs"))
    last_tick = models.BigIntegerField(
        _("last tick"),
        db_default=NowMilliseconds(),
        help_text=_("ticks up to this time were decided; never moves back"),
    )
    last_run = models.BigIntegerField(_("last run"), db_default=0, help_text=_("last tick that was published; 0: none"))
    skipped = models.BigIntegerField(
        _("skipped"), db_default=0, help_text=_("ticks while an earlier job had not ended")
    )
    paused_at = models.BigIntegerField(_("paused at"), db_default=0, help_text=_("0: not paused"))
    registered_at = models.BigIntegerField(
        _("registered at"), db_default=NowMilliseconds(), help_text=_("when its definition last changed")
    )
    seen_at = models.BigIntegerField(
        _("seen at"), db_default=NowMilliseconds(), help_text=_("when a process that declares it was last seen")
    )

    class Meta:
        db_table = SCHEDULES
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")

    def __str__(self) -> str:
        return self.name
