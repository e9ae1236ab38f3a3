"""Class 11: secrets that are planted in a configuration come out nowhere."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.kit.cli import Result
from tests.kit.secret_files import secret_file
from tests.kit.until import free_ports
from tests.secure.secret_proxy import RunningProxy, call, running_proxy, wait_until
from tests.secure.secure_world import PASSWORD, USER, Issuer, SecureKafka
from tests.tls.tls_files import Authority

CLASS = 11
PLANTED = {
    "token": "planted-token-of-producers",
    "admin token": "planted-token-of-operators",
    "peer secret": "planted-secret-of-proxies",
    "group secret": "planted-secret-of-a-group",
    "Kafka password in the environment": PASSWORD,
    "Kafka password in a file": "planted-password-of-kafka",
    "query of a check URL": "planted-query-of-a-url",
    "value of a message": "planted-value-of-a-message",
    "key of a message": "planted-key-of-a-message",
    "header of a message": "planted-header-of-a-message",
    "token of a stranger": "planted-token-of-a-stranger",
}
PREFIX, GROUP = "planted", "orders"
PLACES = (
    "log",
    "command line",
    "metrics",
    "readyz",
    "overview",
    "list",
    "error answers",
    "tx list",
    "doctor",
    "doctor bundle",
    "start that Kafka refuses",
    "start with a bad file",
)

pytestmark = pytest.mark.needs_tool("openssl")

Json = dict[str, Any]


def spelled(secret: str) -> set[str]:
    escaped = {json.dumps(secret, ensure_ascii=plain)[1:-1] for plain in (True, False)}
    coded = base64.b64encode(secret.encode()).decode().rstrip("=")
    return {secret, repr(secret)[1:-1], quote(secret), quote(secret, safe=""), coded, *escaped}


class Planted:
    """An installation whose configuration is full of secrets, and all its output."""

    def __init__(self, kafka: SecureKafka, folder: Path) -> None:
        self.folder = folder
        self.files = {
            name: secret_file(folder / name.replace(" ", "-"), PLANTED[name])
            for name in ("token", "admin token", "peer secret")
        }
        self.files["group secret"] = secret_file(folder / GROUP, PLANTED["group secret"])
        self.admin = f"127.0.0.1:{free_ports(1)[0]}"
        login = kafka.options("CLEAR")
        del login["kafka_sasl_password_file"]
        self.options: Json = {**login, "topic_prefix": PREFIX, "partitions": 1}
        self.secrets = {"TXBROKER_KAFKA_SASL_PASSWORD": PASSWORD}
        self.own: Json = {
            "token_file": self.files["token"],
            "admin_listen": self.admin,
            "admin_token_file": self.files["admin token"],
            "peer_secret_file": self.files["peer secret"],
            "create_target_topics": True,
            "check_after_s": 0.1,
            "secrets_dir": folder,
        }
        self.output: dict[str, str] = {}

    def config(self, **more: Any) -> list[str]:
        """Return the words that name a config file with all settings."""
        path = self.folder / "txbroker.toml"
        given = {**self.options, **self.own, **more}
        lines = [f"{name} = {json.dumps(value, default=str)}\n" for name, value in given.items()]
        path.write_text("".join(lines))
        return ["--config", str(path)]

    def ask(self, url: str, body: Json | None = None, *, token: str = "admin token") -> str:
        """Call a proxy; return the whole answer, its head included."""
        request = urllib.request.Request(
            url,
            None if body is None else json.dumps(body).encode(),
            {"authorization": f"Bearer {PLANTED[token]}", "content-type": "application/json"},
            method="GET" if body is None else "PUT" if "/v1/groups/" in url else "POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return f"{answer.headers}\n{answer.read().decode()}"
        except urllib.error.HTTPError as error:
            return f"{error.headers}\n{error.read().decode()}"

    def work(self, proxy: RunningProxy) -> None:
        """Make the proxy use its secrets, and collect all output."""
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # a closed port
            port = closed.getsockname()[1]
            check = f"http://127.0.0.1:{port}/check?token={PLANTED['query of a check URL']}"
            self._register_and_prepare(proxy, check)
            wait_until(lambda: "group unreachable" in proxy.log.read_text(), "no check was tried")
            self._look(proxy)

    def _register_and_prepare(self, proxy: RunningProxy, check: str) -> None:
        policy = {"check_url": check, "secret_ref": f"file:{self.files['group secret']}"}
        answer = self.ask(f"{proxy.url}/v1/groups/{GROUP}", policy, token="token")
        assert '"error"' not in answer, answer
        message = {
            "topic": f"{PREFIX}.target",
            "key": PLANTED["key of a message"],
            "value": PLANTED["value of a message"],
            "headers": {"secret": PLANTED["header of a message"]},
        }
        given = {"group": GROUP, "messages": [message]}
        answer = self.ask(f"{proxy.url}/v1/transactions", given, token="token")
        assert '"id"' in answer, answer

    def _look(self, proxy: RunningProxy) -> None:
        admin = f"http://{self.admin}"
        for name, path in (
            ("metrics", "/metrics"),
            ("readyz", "/readyz"),
            ("overview", "/v1/overview"),
            ("list", "/v1/transactions"),
        ):
            self.output[name] = self.ask(admin + path)
        bad = {"group": GROUP, "messages": [{"topic": 1, "value": PLANTED["value of a message"]}]}
        self.output["error answers"] = "".join(
            (
                self.ask(f"{admin}/v1/transactions", token="token"),
                self.ask(f"{admin}/v1/transactions", token="token of a stranger"),
                self.ask(f"{proxy.url}/v1/transactions", bad, token="token"),
                self.ask(f"{proxy.url}/v1/transactions", {}, token="admin token"),
                self.ask(f"{admin}/nowhere"),
                self.ask(f"{proxy.url}/v1/internal/sessions", token="token"),
                self.ask(f"{admin}/v1/transactions/none"),
            )
        )
        self.output["command line"] = Path(f"/proc/{proxy.pid}/cmdline").read_text()
        to = ["--url", admin, "--token-file", str(self.files["admin token"])]
        listed = call(["tx", "list", *to])
        assert listed.code == 0, listed
        self.output["tx list"] = listed.out + listed.err
        bundle = self.folder / "bundle.tar.gz"
        words = ["--debug", "doctor", *self.config(), *to, "--bundle", str(bundle)]
        examined = call(words, self.secrets)
        self.output["doctor"] = examined.out + examined.err
        with tarfile.open(fileobj=io.BytesIO(bundle.read_bytes())) as archive:
            members = [archive.extractfile(member) for member in archive.getmembers()]
            self.output["doctor bundle"] = "".join(
                member.read().decode() for member in members if member is not None
            )

    def fail(self) -> None:
        name = "Kafka password in a file"
        wrong = secret_file(self.folder / "kafka-password", PLANTED[name])
        refused = self._start(kafka_sasl_password_file=wrong)
        assert f"refuses the login of {USER}" in refused.err, refused
        self.output["start that Kafka refuses"] = refused.out + refused.err
        self.files["admin token"].chmod(0o644)
        unsafe = self._start(kafka_sasl_password_file=wrong)
        assert "is open to other users" in unsafe.err, unsafe
        self.output["start with a bad file"] = unsafe.out + unsafe.err

    def _start(self, **more: Any) -> Result:
        words = self.config(listen="127.0.0.1:0", data_dir=self.folder / "failing", **more)
        ended = call(["--debug", "proxy", *words, "--log-level", "debug"])
        assert ended.code != 0, ended
        return ended


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    """The site, when everything has been looked at."""
    folder = tmp_path_factory.mktemp("planted")
    authority, issuer = Authority(folder, "ca"), Issuer(folder)
    kafka = SecureKafka(folder, authority, issuer, "https://127.0.0.1:9/token")
    with contextlib.ExitStack() as stack:
        stack.callback(kafka.server.stop)
        kafka.start()
        found = Planted(kafka, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        given = {"config": found.config()[1]}
        with running_proxy(found.folder, given, found.secrets) as proxy:
            found.work(proxy)
        found.output["log"] = proxy.log.read_text()
        found.fail()
        yield found


EXPECTED = {
    "log": '"event": "ready"',
    "command line": "--config",
    "metrics": "txbroker_pending",
    "readyz": "ready",
    "overview": "partitions",
    "list": '"transactions"',
    "error answers": "unauthorized",
    "tx list": GROUP,
    "doctor": "kafka",
    "doctor bundle": "python_info",
    "start that Kafka refuses": "refuses the login",
    "start with a bad file": "chmod 600",
}


@pytest.mark.parametrize("place", PLACES)
def test_planted_place_was_searched(planted: Planted, place: str) -> None:
    """The control of the cases above: the place has its expected output."""
    assert EXPECTED[place] in planted.output[place]


@pytest.mark.parametrize("secret", PLANTED)
@pytest.mark.parametrize("place", PLACES)
def test_planted_secret_appears_nowhere(planted: Planted, place: str, secret: str) -> None:
    """Not found."""
    text = planted.output[place]
    assert [written for written in spelled(PLANTED[secret]) if written in text] == []
