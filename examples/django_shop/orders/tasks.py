from fairlane import Concurrency, Fair, Rate
from fairlane.integrations.django import app
from orders.models import Order

app.queue(
    "confirmations",
    fair=Fair(by="customer"),  # one customer with a thousand orders does not delay the others
    limits=[
        Concurrency(2, by="customer"),
        Rate(100, per="1s"),  # what the mail server takes
    ],
)


@app.task(queue="confirmations")
def confirm(order: int, customer: str) -> str:
    Order.objects.filter(id=order).update(is_confirmed=True)
    return f"order {order} of {customer} is confirmed"


@app.task(queue="confirmations")
async def count_orders(customer: str) -> int:
    return await Order.objects.filter(customer=customer).acount()
