from django.db import models


class Visit(models.Model):
    patient = models.CharField(max_length=100)
