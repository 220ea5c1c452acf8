"""Rows of the project's own."""

from __future__ import annotations

from django.db import models


class Note(models.Model):
    text = models.CharField(max_length=100)
