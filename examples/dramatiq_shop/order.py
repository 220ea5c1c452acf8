"""Sends mails the way a program of Dramatiq does, and waits for them."""

from shop import app, send_mail

messages = [send_mail.send(number, account=account) for number in (1, 2, 3) for account in ("acme", "bolt")]
for message in messages:
    print(app.job(message.message_id).result_sync(timeout="1m"))
app.close_sync()
