from django.db import models


class Invoice(models.Model):
    order = models.IntegerField(unique=True)

    def __str__(self) -> str:
        return f"invoice of order {self.order}"


class Mail(models.Model):
    text = models.TextField()

    def __str__(self) -> str:
        return self.text
