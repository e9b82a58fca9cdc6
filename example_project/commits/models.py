"""The application's tables. The publisher writes ``Commit``; the consumer groups and the jobs write the others."""

from __future__ import annotations

from django.db import models


class Commit(models.Model):
    """A commit of a public repository, stored in the transaction that publishes its event."""

    repository = models.CharField(max_length=100)
    sha = models.CharField(max_length=40)
    committed_at = models.DateTimeField()
    parents = models.PositiveSmallIntegerField()
    files = models.PositiveIntegerField()
    insertions = models.PositiveIntegerField()
    deletions = models.PositiveIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["repository", "sha"], name="commits_commit_sha")]

    def __str__(self) -> str:
        return f"{self.repository} {self.sha[:10]}"


class DailyStatistics(models.Model):
    """Totals of a repository's commits on one day (UTC), maintained by the group ``statistics``."""

    repository = models.CharField(max_length=100)
    day = models.DateField()
    commits = models.PositiveIntegerField(default=0)
    merges = models.PositiveIntegerField(default=0)
    files = models.PositiveIntegerField(default=0)
    insertions = models.PositiveIntegerField(default=0)
    deletions = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name = verbose_name_plural = "daily statistics"
        constraints = [models.UniqueConstraint(fields=["repository", "day"], name="commits_statistics_day")]

    def __str__(self) -> str:
        return f"{self.repository} {self.day}"


class ReplayedStatistics(models.Model):
    """Totals of a repository's replayed commits, maintained by the group ``statistics`` on the topic of replays."""

    repository = models.CharField(max_length=100, unique=True)
    commits = models.PositiveIntegerField(default=0)
    merges = models.PositiveIntegerField(default=0)
    files = models.PositiveIntegerField(default=0)
    insertions = models.PositiveIntegerField(default=0)
    deletions = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name = verbose_name_plural = "replayed statistics"

    def __str__(self) -> str:
        return self.repository


class RepositoryOrder(models.Model):
    """The last event of a repository that the group ``order-check`` has handled."""

    repository = models.CharField(max_length=100, unique=True)
    last_sequence = models.PositiveIntegerField()
    duplicates = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name_plural = "repository order"

    def __str__(self) -> str:
        return f"{self.repository} up to {self.last_sequence}"


class OrderViolation(models.Model):
    """An event whose first attempt started before that of an earlier event. There should be none."""

    repository = models.CharField(max_length=100)
    expected = models.PositiveIntegerField()
    received = models.PositiveIntegerField()
    offset = models.BigIntegerField()
    found_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.repository}: {self.received} before {self.expected}"


class RepositorySummary(models.Model):
    """Totals of a repository, which the job ``summarize`` stores."""

    repository = models.CharField(max_length=100, unique=True)
    commits = models.PositiveIntegerField(default=0)
    insertions = models.PositiveIntegerField(default=0)
    deletions = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name_plural = "repository summaries"

    def __str__(self) -> str:
        return f"{self.repository}: {self.commits} commits"


class ReviewTask(models.Model):
    """A commit that is large enough to need a review, stored by the group ``review``."""

    repository = models.CharField(max_length=100)
    sha = models.CharField(max_length=40)
    files = models.PositiveIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["repository", "sha"], name="commits_review_sha")]

    def __str__(self) -> str:
        return f"{self.repository} {self.sha[:10]}: {self.files} files"
