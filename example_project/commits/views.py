"""A page that shows commits as they arrive, without a consumer group, and one that shows the progress of a job."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.mixins import LoginRequiredMixin
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.generic import TemplateView, View

from django_mysqlqueue.tails import ReceivedMessage, TailView
from django_mysqlqueue.tasks import cancel_job, progress_of
from example_project.commits import tasks
from example_project.commits.compat import TaskResultDoesNotExist, TaskResultMismatch
from example_project.commits.events import TOPIC, CommitEvent


class CommitStream(TailView):
    """The events of the page. Users need the permission to see payloads; the page needs only some of their fields."""

    topics = (TOPIC,)

    def serialize(self, message: ReceivedMessage) -> dict[str, Any]:
        event = CommitEvent.from_payload(message.payload)
        return {
            "offset": message.offset,
            "repository": event.repository,
            "sequence": event.sequence,
            "sha": event.sha[:10],
            "files": event.files,
        }


class LivePage(LoginRequiredMixin, TemplateView):
    login_url = "admin:login"
    template_name = "commits/live.html"
    extra_context = {"topic": TOPIC}


class JobsPage(LoginRequiredMixin, View):
    """Starts the job, or leads to the one that waits already."""

    login_url = "admin:login"

    def get(self, request: HttpRequest) -> HttpResponse:
        return render(request, "commits/job.html")

    def post(self, request: HttpRequest) -> HttpResponse:
        return redirect("job", tasks.recount.enqueue().id)


class JobPage(LoginRequiredMixin, View):
    """Shows a job, and reloads itself until the job has ended."""

    login_url = "admin:login"

    def get(self, request: HttpRequest, result_id: str) -> HttpResponse:
        result = self._result(result_id)
        response = render(request, "commits/job.html", {"result": result, "progress": progress_of(result)})
        if not result.is_finished:
            response["Refresh"] = "1"
        return response

    def post(self, request: HttpRequest, result_id: str) -> HttpResponse:
        cancel_job(self._result(result_id))
        return redirect("job", result_id)

    @staticmethod
    def _result(result_id: str) -> Any:
        try:
            return tasks.recount.get_result(result_id)
        except (TaskResultDoesNotExist, TaskResultMismatch) as error:
            raise Http404(result_id) from error
