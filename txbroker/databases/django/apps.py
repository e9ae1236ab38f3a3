"""The app's configuration."""

from django.apps import AppConfig


class TxbrokerConfig(AppConfig):  # type: ignore[misc]
    """txbroker's tables; it has no models."""

    name = "txbroker.databases.django"
    label = "txbroker"
