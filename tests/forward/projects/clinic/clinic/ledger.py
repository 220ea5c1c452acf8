import json
import time

from django.conf import settings


def write(what, **facts):
    line = json.dumps({"what": what, "at": time.time(), **facts})
    with settings.LEDGER.open("a") as file:
        file.write(line + "\n")


def read():
    return [json.loads(line) for line in settings.LEDGER.read_text().splitlines()] if settings.LEDGER.exists() else []
