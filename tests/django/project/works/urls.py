"""A view that enqueues, in a transaction; async, outside of one; and the admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db import transaction
from django.http import HttpResponse
from django.urls import path

from works.models import Note
from works.tasks import write


def place(request: Any) -> Any:
    with transaction.atomic():
        Note.objects.create(text=request.GET["text"])
        job = write.enqueue_sync(f"job of {request.GET['text']}")
        if "fails" in request.GET:
            transaction.set_rollback(True)
    return HttpResponse(str(job.id))


async def place_async(request: Any) -> Any:
    job = await write.enqueue(f"job of {request.GET['text']}")
    return HttpResponse(str(await job.status()) if "look" in request.GET else "ok")


urlpatterns = [path("admin/", admin.site.urls), path("place", place), path("place-async", place_async)]
