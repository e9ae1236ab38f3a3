"""Packs an archive for support, without secrets and messages.

No message is ever read. Secret settings are left out; the content of secret files, and users and
queries of URLs, are struck out of all texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import platform
import re
import sys
import tarfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import msgspec

from txbroker import __version__
from txbroker.cli.doctor.report import DoctorReport, as_json
from txbroker.cli.doctor.subject import HttpProxies, Subject, Unavailable
from txbroker.config.addresses import parse_secret_variable, read_secret
from txbroker.config.settings import Settings
from txbroker.errors import TxbrokerError

STRUCK_OUT = "<struck-out>"
PROXIES_MAX = 50
_BOTH = (True, False)
_OWNER_ONLY = 0o600
_SECRET_NAME = re.compile("password|secret|token|jaas|credential|username|passphrase|key_file")
_USER_IN_URL = re.compile(r"(?<=://)[^/\s\"'@]+@")
_QUERY_IN_URL = re.compile(r"(\w://[^\s\"'?#]*)[?#][^\s\"',;)]*")
_LIBRARIES = ("aiokafka", "aiohttp", "msgspec", "h11", "pydantic", "click", "uvloop")


async def pack(
    path: Path, subject: Subject, report: DoctorReport, secrets: Iterable[str]
) -> list[str]:
    """Write the archive with `secrets` struck out, and return the names of its files."""
    redact = Redactor(secrets)
    files = {
        "versions.json": _json(await _versions(subject)),
        "settings.json": _json(settings_shown(subject.settings)),
        "topics.json": _json(await _topics(subject)),
        "doctor.json": as_json(report),
        **await _proxies(subject),
    }
    try:
        _write(path, {name: redact(text) for name, text in files.items()}, report.at_s)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
    return sorted(files)


def known_secrets(settings: Settings, token: str) -> list[str]:
    """Return the readable secrets that settings name."""
    secrets = [token] if token else []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Path) and _SECRET_NAME.search(name):
            for path in sorted(value.rglob("*")) if value.is_dir() else [value]:
                # A file that cannot be read cannot get into the archive either.
                with contextlib.suppress(TxbrokerError):
                    secrets.append(read_secret(name, path))
        elif name == "secret_env_allow":
            variables = [parse_secret_variable(entry)[1] for entry in value]
            secrets += [os.environ.get(variable, "") for variable in variables]
        elif _is_secret(name, value):
            secrets.append(_plain(value))
    return [secret for secret in secrets if secret]


def settings_shown(settings: Settings) -> dict[str, Any]:
    """Return the settings by name, with secrets struck out."""
    shown: dict[str, Any] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if _is_secret(name, value) and value:
            shown[name] = STRUCK_OUT
        else:
            shown[name] = value if isinstance(value, bool | int | float | None) else str(value)
    return shown


def _is_secret(name: str, value: Any) -> bool:
    """Return True if the value itself is a secret; a token's URL is not."""
    if isinstance(value, bool | Path | tuple) or name.endswith("_url"):
        return False
    return _SECRET_NAME.search(name) is not None


class Redactor:
    """Strikes secrets out of texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        # JSON may escape a secret. The longest first, because one may contain another.
        plain = {text for text in secrets if text}
        escaped = (json.dumps(text, ensure_ascii=only)[1:-1] for text in plain for only in _BOTH)
        texts = {*plain, *escaped}
        self._secrets = sorted(texts, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return a text without secrets, and with URLs without users and queries."""
        for secret in self._secrets:
            text = text.replace(secret, STRUCK_OUT)
        text = _USER_IN_URL.sub(f"{STRUCK_OUT}@", text)
        return _QUERY_IN_URL.sub(rf"\1?{STRUCK_OUT}", text)


async def _versions(subject: Subject) -> dict[str, Any]:
    versions: dict[str, Any] = {
        "txbroker": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }
    try:
        versions["brokers"] = [
            {"node": one.node, "address": one.address, "fetch": one.fetch_version, "why": one.why}
            for one in await subject.brokers()
        ]
    except TxbrokerError as error:
        versions["brokers"] = str(error)
    try:
        versions["proxies"] = {
            proxy.url: proxy.version for proxy in (await subject.overview()).proxies
        }
    except Unavailable as error:
        versions["proxies"] = str(error)
    return versions


async def _topics(subject: Subject) -> dict[str, Any]:
    try:
        found, cluster = await subject.found(), await subject.cluster()
    except TxbrokerError as error:
        return {"error": str(error)}
    return {
        name: {
            "partitions": topic.partitions,
            "replication": topic.replication,
            "settings": dict(topic.configs),
            "copies": msgspec.to_builtins(cluster.topics[name].partitions, str_keys=True)
            if name in cluster.topics
            else {},
        }
        for name, topic in sorted(found.items())
    }


async def _proxies(subject: Subject) -> dict[str, str]:
    files: dict[str, str] = {}
    try:
        files["overview.json"] = _json(msgspec.to_builtins(await subject.overview()))
    except Unavailable as error:
        files["overview.txt"] = str(error)
    urls = list(dict.fromkeys([*subject.proxies.named, *await subject.urls()]))[:PROXIES_MAX]
    by_proxy = await asyncio.gather(*(_proxy(subject.proxies, url) for url in urls))
    for number, (url, contents) in enumerate(zip(urls, by_proxy, strict=True), 1):
        folder = f"proxies/{number:02}"
        files[f"{folder}/url.txt"] = url
        files |= {f"{folder}/{name}": text for name, text in contents}
    return files


async def _proxy(proxies: HttpProxies, url: str) -> list[tuple[str, str]]:
    files = []
    try:
        files.append(("readyz.json", _json(msgspec.to_builtins(await proxies.ready(url)))))
    except Unavailable as error:
        return [("error.txt", str(error))]
    try:
        files.append(("metrics.txt", await proxies.metrics(url)))
    except Unavailable as error:
        files.append(("metrics-error.txt", str(error)))
    return files


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False, default=str)


def _plain(value: Any) -> str:
    """Return a setting's text, even of a secret type."""
    reveal = getattr(value, "get_secret_value", None)
    return str(reveal() if reveal is not None else value or "")


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"


def _write(path: Path, files: Mapping[str, str], at_s: float) -> None:
    with (
        open(path, "xb", opener=_for_owner_only) as file,
        tarfile.open(fileobj=file, mode="w:gz") as archive,
    ):
        for name, text in files.items():
            _add(archive, f"txbroker-doctor/{name}", text.encode(), at_s)


def _add(archive: tarfile.TarFile, name: str, content: bytes, at_s: float) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(content), int(at_s), _OWNER_ONLY
    archive.addfile(entry, io.BytesIO(content))


def _for_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, _OWNER_ONLY)
