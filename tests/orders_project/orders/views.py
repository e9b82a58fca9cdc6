from django.http import HttpResponse

from orders.services import place_order


def buy(request):
    place_order(request.POST["book"], "ada@example.com")
    return HttpResponse()
