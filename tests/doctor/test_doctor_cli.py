"""The command line of the doctor, on an installation that is made up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import Result
from tests.kit.doctor import ONE, TWO, World
from tests.kit.secret_files import secret_file
from txbroker.cli.contexts import CredentialFiles
from txbroker.cli.doctor import checks_kafka, command
from txbroker.cli.doctor.report import CHECKS, scope_of
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.databases.urls import from_url
from txbroker.errors import KafkaUnavailable
from txbroker.net.tls import ClientTls
from txbroker.relay import Outbox

Call = Callable[..., Result]


class Given:
    """What the command made of its options."""

    def __init__(self) -> None:
        self.urls: tuple[str, ...] = ()
        self.headers: dict[str, str] = {}
        self.kafka: Any = None
        self.looked = 0
        self.heals_at = 0


@pytest.fixture
def given() -> Given:
    return Given()


@pytest.fixture
def call(
    world: World,
    given: Given,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Call:
    """Call `txbroker doctor` in this process, round the made-up installation."""
    for name in list(os.environ):
        if name.startswith("TXBROKER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    world.kafka.newest = {}
    world.proxies.proxy(ONE, now_ms=0)
    world.proxies.proxy(TWO, now_ms=0)

    class Examination:
        def __init__(self, settings: Any) -> None:
            given.kafka = settings
            given.looked += 1
            if given.looked == given.heals_at:
                world.kafka.failure = None

        async def __aenter__(self) -> Any:
            return world.kafka

        async def __aexit__(self, *_: object) -> None:
            pass

    def proxies(urls: list[str], headers: dict[str, str], *_: ClientTls) -> Any:
        given.urls, given.headers = tuple(urls), headers
        return world.proxies

    monkeypatch.setattr(command, "KafkaExamination", Examination)
    monkeypatch.setattr(command, "HttpProxies", proxies)
    monkeypatch.setattr(command, "_PAUSE_S", 0.0)
    monkeypatch.setattr(checks_kafka, "_WATCH_S", 0.0)

    def calling(*arguments: object) -> Result:
        capsys.readouterr()
        code = run(cli, ["doctor", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Result(code, out, err)

    return calling


def test_all_is_well(call: Call, given: Given) -> None:
    done = call("--kafka", "k1:1,k2:2", "--url", ONE, "--proxy", TWO)
    assert (done.code, "FAILS" in done.out) == (0, False)
    assert "ok      kafka-reachable" in done.out
    assert "warning access-kafka" in done.out  # PLAINTEXT to other machines
    assert done.err.startswith(f"{len(CHECKS) - 3} ok, 3 warnings.")
    assert given.urls == (ONE, TWO)
    assert given.kafka.bootstrap_servers == ("k1:1", "k2:2")
    assert given.kafka.client_id == "txbroker-doctor"


def test_database_adds_relays_or_is_checked_alone(call: Call, world: World, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    Outbox(from_url(url, create_tables=True)).create()
    for arguments, proxies in ((("--url", ONE), True), ((), False)):
        checks = scope_of(url, None, proxies=proxies).checks
        done = call("--database", url, "-o", "json", *arguments)
        assert done.code == 0, done.err
        assert [one["name"] for one in done.json["checks"]] == [one.name for one in checks]
    assert call("--database", "nothing").code == 2


def test_failing_check_exits_with_1(call: Call, world: World) -> None:
    world.kafka.remove("op")
    done = call()
    assert done.code == 1
    assert "FAILS   topics-there" in done.out


def test_output_for_programs(call: Call, world: World) -> None:
    assert call("-o", "json").json["healthy"] is True
    world.proxies.gone()
    failed = call("-o", "json")
    assert (failed.code, failed.json["healthy"]) == (1, False)
    assert "txbroker_doctor_healthy 0" in call("-o", "prometheus").out.splitlines()


def test_wait_ends_when_nothing_fails(call: Call, world: World, given: Given) -> None:
    world.kafka.failure = KafkaUnavailable("not yet")
    given.heals_at = 3
    done = call("--wait")
    assert (done.code, given.looked) == (0, 3), done
    assert done.err.count("Waiting for at most 300 s: ") == 2
    assert done.out.count("kafka-reachable") == 1


def test_wait_ends_at_its_timeout(call: Call, world: World, given: Given) -> None:
    world.kafka.failure = KafkaUnavailable("never")
    done = call("--wait", "0.2", "-o", "json")
    assert (done.code, done.json["healthy"]) == (1, False)
    assert given.looked > 1


def test_doctor_does_not_wait_by_default(call: Call, world: World, given: Given) -> None:
    world.kafka.failure = KafkaUnavailable("never")
    assert (call().code, given.looked) == (1, 1)


def test_a_bundle(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    done = call("--bundle", path)
    assert (done.code, path.stat().st_size > 500) == (0, True)
    assert f"Packed into {path}: doctor.json" in done.err
    again = call("--bundle", path)
    assert (again.code, "exists already" in again.err) == (2, True)


def test_a_bundle_of_what_fails(call: Call, world: World, tmp_path: Path) -> None:
    world.proxies.gone()
    done = call("--bundle", tmp_path / "b.tar.gz")
    assert (done.code, (tmp_path / "b.tar.gz").exists()) == (1, True)


def test_options_are_environment_variables(
    call: Call, world: World, given: Given, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world.kafka.failure = KafkaUnavailable("not yet")
    given.heals_at = 2
    monkeypatch.setenv("TXBROKER_URL", ONE)
    monkeypatch.setenv("TXBROKER_PROXY", f"{TWO} http://three:8470")
    monkeypatch.setenv("TXBROKER_WAIT", "30")
    monkeypatch.setenv("TXBROKER_BUNDLE", str(tmp_path / "b"))
    monkeypatch.setenv("TXBROKER_DOCTOR_OUTPUT", "json")
    monkeypatch.setenv("TXBROKER_KAFKA", "k:1")
    # An output format of lists: the doctor refuses it.
    monkeypatch.setenv("TXBROKER_OUTPUT", "wide")
    done = call()
    assert (done.code, done.json["healthy"], given.looked) == (0, True, 2), done
    assert given.urls == (ONE, TWO, "http://three:8470")
    assert given.kafka.bootstrap_servers == ("k:1",)
    assert (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kafka", "nonsense"),
        ("--proxy", "ftp://x"),
        ("--proxy", "http://u:p@x"),
        ("--url", "http://"),
        ("-o", "yaml"),
        ("--wait", "-5"),
        ("--token-file", "/does/not/exist"),
        ("--config", "/does/not/exist"),
        ("--topic-prefix", "a b"),
    ],
)
def test_wrong_usage(call: Call, given: Given, arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert (done.code, given.looked) == (2, 0), done
    assert done.out == ""


def test_token_is_sent_and_not_shown(call: Call, given: Given, tmp_path: Path) -> None:
    token = tmp_path / "token"
    secret_file(token, "t0ken-of-16-chars\n")
    done = call("--token-file", token)
    assert given.headers == {"authorization": "Bearer t0ken-of-16-chars"}
    assert "t0ken" not in (done.out + done.err).replace(str(token), "")
    assert call().code == 0
    assert given.headers == {}


def test_token_of_settings_is_not_sent_to_contexts(
    call: Call, given: Given, tmp_path: Path
) -> None:
    token, config = tmp_path / "token", tmp_path / "config.toml"
    secret_file(token, "t0ken-of-16-chars")
    config.write_text(f'token_file = "{token}"\n')
    call("--config", config)
    assert given.headers == {"authorization": "Bearer t0ken-of-16-chars"}
    assert run(cli, ["context", "set", "elsewhere", "--url", "http://elsewhere:8470"]) == 0
    call("--config", config, "--context", "elsewhere")
    assert given.urls[0] == "http://elsewhere:8470"
    assert given.headers == {}


def test_anonymous_calls_have_no_certificate(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    token = secret_file(tmp_path / "token", "t0ken-of-16-or-more")
    config.write_text(
        f'token_file = "{token}"\npeers_ca_file = "ca"\n'
        'tls_cert_file = "certificate"\ntls_key_file = "key"\n'
    )
    shown: list[CredentialFiles] = []

    def tls_of(credentials: CredentialFiles) -> ClientTls:
        shown.append(credentials)
        return ClientTls()

    monkeypatch.setattr(command, "tls_of", tls_of)
    call("--config", config)
    ours, nobodys = shown
    assert ours == CredentialFiles(token, Path("ca"), Path("certificate"), Path("key"))
    assert nobodys == CredentialFiles(ca_file=Path("ca"))
