from django.db import models


class Order(models.Model):
    customer = models.CharField(max_length=100)
    cents = models.PositiveIntegerField()
    is_confirmed = models.BooleanField(default=False)
