"""What Django does with Fairlane when a project starts."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig, apps
from django.core import checks
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate
from django.utils.module_loading import module_has_submodule

__all__ = ["FairlaneConfig"]


class FairlaneConfig(AppConfig):
    """`"fairlane.integrations.django"` in INSTALLED_APPS."""

    name = "fairlane.integrations.django"
    label = "fairlane"
    verbose_name = "Fairlane"

    def ready(self) -> None:
        from fairlane.errors import ConfigurationError
        from fairlane.integrations.django import checks as fairlane_checks
        from fairlane.integrations.django import schema, settings

        checks.register(fairlane_checks.check_settings, "fairlane")
        checks.register(fairlane_checks.check_schema, checks.Tags.database)
        try:
            given = settings.load_settings()
        except ConfigurationError:
            return  # `manage.py check` tells; so does whoever asks for the app
        for config in apps.get_app_configs():
            for module in given.task_modules:
                if config.name != self.name and module_has_submodule(config.module, module):
                    import_module(f"{config.name}.{module}")
        fairlane_checks.prepare_backends()
        post_migrate.connect(schema.on_migrated, sender=self, dispatch_uid="fairlane")
        connection_created.connect(schema.on_connected, dispatch_uid="fairlane")
