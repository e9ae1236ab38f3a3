"""Command line options of a proxy's settings."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from txbroker.cli.options import FILE, SectionOption, with_options
from txbroker.cli.run import usage_errors
from txbroker.config.access import KafkaAccess, ListenerAccess
from txbroker.config.settings import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    SECRET_SETTINGS,
    Settings,
    load_settings,
)

F = TypeVar("F", bound=Callable[..., Any])

KAFKA_SETTINGS = tuple(name for name in Settings.model_fields if name.startswith("kafka"))
_EXPLAINED = frozenset({"kafka", "listen", "data_dir", "workers"})
"""Settings that the short help of a command explains; it names the others."""
TOPIC_SETTINGS = (
    *KAFKA_SETTINGS,
    "topic_prefix",
    "partitions",
    "half_retention_s",
    "check_after_s",
    "check_interval_s",
    "check_attempts_max",
    "check_timeout_s",
    "dedup_window_s",
)


def setting_options(names: Collection[str]) -> Callable[[F], F]:
    """Give a command `--config` and an option for each of these settings.

    Secrets have no option, because every user of a machine sees the options of a process.
    """
    shown = set(names) - SECRET_SETTINGS
    return with_options(
        click.option(
            "--config",
            type=FILE,
            metavar="FILE",
            help=f"Read settings from this TOML file, one key for each. [env: {CONFIG_VARIABLE}]",
            envvar=CONFIG_VARIABLE,
        ),
        *(_option(name, field) for name, field in Settings.model_fields.items() if name in shown),
    )


def settings_from(config: Path | None, options: dict[str, Any]) -> Settings:
    """Return the settings from a command's options, environment and config file."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    with usage_errors():
        return load_settings(given, config=config)


def _section(name: str) -> str:
    if name in KafkaAccess.model_fields or name == "wait_for_kafka_s":
        return "Kafka"
    if name in ListenerAccess.model_fields:
        return "Addresses and access"
    if name.startswith("check"):
        return "Check-back"
    return "Limits" if name.endswith(("_max", "_timeout_s", "_min")) else "Proxy and topics"


def _option(name: str, field: FieldInfo) -> Callable[[F], F]:
    dashed = name.replace("_", "-")
    declaration = f"--{dashed}/--no-{dashed}" if field.annotation is bool else f"--{dashed}"
    kind = field.annotation
    options: dict[str, Any] = {}
    if get_origin(kind) is Literal:
        options["type"] = click.Choice([str(choice) for choice in get_args(kind)])
    elif get_origin(kind) is tuple:
        options["multiple"] = True
        options["metavar"] = "NAME"
    elif kind is not bool:
        options["metavar"] = _metavar(name)
    return click.option(
        declaration,
        name,
        default=None,
        cls=SectionOption,
        section=_section(name),
        brief=name not in _EXPLAINED,
        help=f"{field.description} [env: {ENV_PREFIX}{name.upper()}{_default(field)}]",
        **options,
    )


def _metavar(name: str) -> str:
    ends = {
        "_s": "SECONDS",
        "_bytes_max": "BYTES",
        "_max": "N",
        "workers": "N",
        "_file": "FILE",
        "_dir": "DIR",
        "partitions": "N",
        "listen": "HOST:PORT",
        "kafka": "HOST:PORT",
        "advertise": "URL",
    }
    return next((shown for end, shown in ends.items() if name.endswith(end)), "TEXT")


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.default_factory is not None or value in (None, "", ()) or isinstance(value, bool):
        return "; default: on" if value is True else ""
    shown = f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value)
    return f"; default: {shown.removesuffix('.0')}"
