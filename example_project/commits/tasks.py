"""Jobs: a summary of each repository, and then a ranking of them; and one that recurs."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, Sum

from django_mysqlqueue.tasks import JobCancelled, call, enqueue_chain, job, recurring
from example_project.commits.compat import task
from example_project.commits.models import Commit, RepositorySummary, ReviewTask

COUNT_EVERY = 5
"""Seconds between two counts of the reviews."""
LONGEST = 10
"""Number of repositories in the ranking."""


@task
def summarize(repository: str) -> list[Any]:
    """Store the totals of a repository. They commit together with the result."""
    rows = Commit.objects.filter(repository=repository)
    totals = rows.aggregate(commits=Count("pk"), insertions=Sum("insertions"), deletions=Sum("deletions"))
    RepositorySummary.objects.update_or_create(repository=repository, defaults=totals)
    return [repository, totals["commits"]]


@task(takes_context=True)
def rank(context: Any) -> list[list[Any]]:
    """Return the repositories with the most commits, from the results of the stage before."""
    found = [result.return_value for result in context.previous_results()]
    return sorted(found, key=lambda row: (-row[1], row[0]))[:LONGEST]


@task(takes_context=True)
@job(unique="until_started")
def recount(context: Any) -> int:
    """Compute all summaries again, one repository after another; return how many. The page ``jobs/`` shows it."""
    repositories = sorted(set(Commit.objects.values_list("repository", flat=True)))
    for done, repository in enumerate(repositories):
        if context.cancelled:
            raise JobCancelled(f"{done} of {len(repositories)} repositories were done.")
        context.progress(done, len(repositories), repository)
        summarize.call(repository)
    context.progress(len(repositories), max(1, len(repositories)))
    return len(repositories)


@recurring(every=COUNT_EVERY)
@task
def count_reviews() -> int:
    """Count the reviews that are to be done, again and again."""
    return ReviewTask.objects.count()


def enqueue_ranking(repositories: list[str]) -> Any:
    """Enqueue a job for each repository, and then the ranking; return the result of the ranking."""
    *_, [ranking] = enqueue_chain([call(summarize, repository) for repository in repositories], call(rank))
    return ranking
