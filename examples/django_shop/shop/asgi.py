import os

from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
site = ASGIStaticFilesHandler(get_asgi_application())  # a web server does that elsewhere

from fairlane.integrations.django.dashboard import with_dashboard  # noqa: E402 - Django is set up by now

application = with_dashboard(site)
