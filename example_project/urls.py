"""URLs: the root redirects to the admin, ``live/`` is a page that follows a topic."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.staticfiles.urls import staticfiles_urlpatterns
from django.urls import path
from django.views.generic import RedirectView

from example_project.commits.views import CommitStream, LivePage

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("live/", LivePage.as_view()),
    path("tail/<str:topic>/", CommitStream.as_view(), name="tail"),
    # runserver serves static files anyway; ASGI servers do with DEBUG.
    *staticfiles_urlpatterns(),
]
