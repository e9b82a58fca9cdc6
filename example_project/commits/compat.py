"""Django's framework for tasks: ``django.tasks`` since Django 6.0, or the package django-tasks before.

A project with one version of Django imports one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_tasks import task
    from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
else:
    try:
        from django.tasks import task
        from django.tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
    except ImportError:
        from django_tasks import task
        from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch

__all__ = ["TaskResultDoesNotExist", "TaskResultMismatch", "task"]
