from django.db import models


class Order(models.Model):
    book = models.CharField(max_length=100)
    email = models.EmailField()
    confirmed = models.BooleanField(default=False)

    def __str__(self) -> str:
        return f"order {self.pk}"


class Invoice(models.Model):
    order = models.IntegerField(unique=True)

    def __str__(self) -> str:
        return f"invoice of order {self.order}"
