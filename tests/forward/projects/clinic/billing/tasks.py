from celery import shared_task
from clinic import ledger


@shared_task
def add(x, y):
    ledger.write("add", numbers=[x, y])
    return x + y


@shared_task
def total(numbers):
    ledger.write("total", numbers=numbers)
    return sum(numbers)


@shared_task
def refuse():
    ledger.write("refuse")
    raise ValueError("no credit")


@shared_task
def apologise(request, error, traceback):
    ledger.write("apologise", error=str(error))


@shared_task(bind=True)
def split(self, number):
    ledger.write("split", number=number)
    raise self.replace(add.s(number, number))
