"""Sends mails the way a program of Celery does, and waits for them."""

from shop import app, send_mail

sent = [send_mail.delay(number, account=account) for number in (1, 2, 3) for account in ("acme", "bolt")]
for each in sent:
    print(app.job(each.id).result_sync(timeout="1m"))
app.close_sync()
