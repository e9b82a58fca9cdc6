from django.urls import path
from orders.views import buy

urlpatterns = [path("buy/", buy)]
