"""URLs: the root redirects to the admin, ``live/`` follows a topic, ``jobs/`` starts a job and shows its progress."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.staticfiles.urls import staticfiles_urlpatterns
from django.urls import path
from django.views.generic import RedirectView

from example_project.commits.views import CommitStream, JobPage, JobsPage, LivePage

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("live/", LivePage.as_view()),
    path("jobs/", JobsPage.as_view(), name="jobs"),
    path("jobs/<str:result_id>/", JobPage.as_view(), name="job"),
    path("tail/<str:topic>/", CommitStream.as_view(), name="tail"),
    # runserver serves static files anyway; ASGI servers do with DEBUG.
    *staticfiles_urlpatterns(),
]
