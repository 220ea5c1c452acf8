"""Sends mails the way a program of Taskiq does, and waits for them."""

import asyncio

from shop import app, send_mail


async def main() -> None:
    async with app:
        sent = [await send_mail.kiq(number, account=account) for number in (1, 2, 3) for account in ("acme", "bolt")]
        for each in sent:
            print(await app.job(each.task_id).result(timeout="1m"))


asyncio.run(main())
