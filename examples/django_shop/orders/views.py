from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import aget_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from orders.models import Order
from orders.tasks import confirm


@csrf_exempt
@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    """The order and the job that confirms it are stored together, or neither is."""
    customer, cents = request.POST["customer"], int(request.POST["cents"])
    with transaction.atomic():
        order = Order.objects.create(customer=customer, cents=cents)
        confirm.enqueue_sync(order.id, customer)
        if cents > 100_000:
            transaction.set_rollback(True)
            return JsonResponse({"refused": "too expensive"}, status=422)
    return JsonResponse({"order": order.id}, status=201)


async def show_order(request: HttpRequest, number: int) -> JsonResponse:
    order = await aget_object_or_404(Order, id=number)
    return JsonResponse({"customer": order.customer, "is_confirmed": order.is_confirmed})
