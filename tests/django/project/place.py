"""Requests to the site, and what a worker makes of them: run by `manage.py shell`, beside a worker."""

from __future__ import annotations

import os

from django.test import Client

from fairlane.errors import JobNotFound
from fairlane.integrations.django import app
from works.models import Note
from works.tasks import count_in_a_process, greet, write_async

kept = app.job(Client().get("/place", {"text": "kept"}).content.decode())
lost = app.job(Client().get("/place", {"text": "lost", "fails": "1"}).content.decode())
kept.result_sync("60s")
try:
    lost.status_sync()
except JobNotFound:
    print("lost: nothing is left")
write_async.enqueue_sync("async").result_sync("60s")
count, process = count_in_a_process.enqueue_sync().result_sync("60s")
print(f"counted: {count}, {'elsewhere' if process != os.getpid() else 'here'}")
greeting = greet.enqueue(name="ada")
app.job(greeting.id).result_sync("60s")
greeting.refresh()
print(f"greeting: {greeting.return_value}")
print("notes:", ", ".join(Note.objects.order_by("id").values_list("text", flat=True)))
