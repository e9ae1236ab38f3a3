"""Settings: where they come from, and every contradiction that is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.kit.secret_files import secret_file
from txbroker.config.addresses import Address, parse_address, parse_servers, read_secret
from txbroker.config.settings import Settings, load_settings
from txbroker.errors import ConfigurationError


def refused(options: dict[str, Any] | None = None, **environ: str) -> str:
    """Return the sentence with which settings are refused."""
    with pytest.raises(ConfigurationError) as refusal:
        load_settings(options, environ=environ)
    message = str(refusal.value)
    assert "pydantic" not in message
    assert "\n" not in message
    return message


def test_defaults_are_sound() -> None:
    settings = load_settings(environ={})
    assert settings.listen_address == Address("127.0.0.1", 8470)
    assert settings.advertise_url == "http://127.0.0.1:8470"
    assert settings.topic("half") == "txbroker.half"
    assert settings.check_window_s == 6 + 14 * 30 + 5
    assert settings.kafka_secret("kafka_sasl_password") == ""


def test_option_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "txbroker.toml"
    file.write_text('partitions = 5\ncheck_after_s = 5\nkafka = "file:1"\n')
    environ = {"TXBROKER_CHECK_AFTER_S": "7", "TXBROKER_KAFKA": "env:1"}
    settings = load_settings({"kafka": "opt:1", "listen": None}, config=file, environ=environ)

    assert (settings.partitions, settings.check_after_s, settings.kafka) == (5, 7.0, "opt:1")
    assert settings.listen == "127.0.0.1:8470"


def test_environment_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "txbroker.toml"
    file.write_text('allowed_hosts = ["a", "b"]\n')
    assert load_settings(environ={"TXBROKER_CONFIG": str(file)}).allowed_hosts == ("a", "b")


def test_environment_holds_lists_and_switches() -> None:
    lists = ("allowed_hosts", "check_url_allow", "check_url_deny", "secret_env_allow")
    environ = {f"TXBROKER_{name.upper()}": "a, b," for name in lists}
    settings = load_settings(environ={**environ, "TXBROKER_CREATE_TARGET_TOPICS": "true"})
    assert {getattr(settings, name) for name in lists} == {("a", "b")}
    assert settings.create_target_topics is True


@pytest.mark.parametrize(
    ("given", "loopback"),
    [
        ({}, True),
        ({"listen": "localhost:0"}, True),
        ({"listen": "[::1]:0", "admin_listen": "127.0.0.1:0"}, True),
        ({"listen": "0.0.0.0:0"}, False),
        ({"listen": "10.0.0.1:0"}, False),
        ({"listen": "proxy-1:0"}, False),
        ({"admin_listen": "[::]:0"}, False),
        ({"peer_listen": "0.0.0.0:0"}, False),
        ({"peer_listen": "127.0.0.1:0"}, True),
    ],
)
def test_a_proxy_that_is_on_loopback_only(given: dict[str, Any], loopback: bool) -> None:
    assert Settings(**given).loopback_only is loopback


def test_settings_by_hand_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXBROKER_PARTITIONS", "9")
    assert Settings().partitions == 2


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().partitions = 5  # type: ignore[misc]


def test_every_setting_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("check_aftr_s = 5", "did you mean 'check_after_s'"),
        ("zzz = 5", "there is no setting 'zzz'"),
        ("kafka = ", "is not TOML"),
        ("partitions = 'many'", "partitions (config file"),
        ("partitions = [1]", "partitions (config file"),
        ("[kafka]\nservers = 1", "kafka (config file"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "txbroker.toml"
    file.write_text(content)
    assert words in refused(TXBROKER_CONFIG=str(file))


def test_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    assert "No such file" in refused(TXBROKER_CONFIG=str(tmp_path / "none"))
    assert "directory" in refused(TXBROKER_CONFIG=str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "is not TOML" in refused(TXBROKER_CONFIG=str(tmp_path / "binary"))


def test_unknown_names_elsewhere() -> None:
    assert "did you mean TXBROKER_CHECK_AFTER_S" in refused(TXBROKER_CHECK_AFTR_S="1")
    assert "option --check-aftr-s" in refused({"check_aftr_s": 1})
    assert load_settings(environ={"TXBROKER_URL": "http://localhost"}).partitions == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # numbers
        ({"partitions": 0}, "partitions (option --partitions) must be greater"),
        ({"check_after_s": -1}, "check_after_s"),
        ({"check_after_s": float("nan")}, "finite"),
        ({"check_interval_s": 0}, "check_interval_s"),
        ({"pending_max": 0}, "pending_max"),
        ({"in_flight_bytes_max": -5}, "in_flight_bytes_max"),
        ({"sessions_max": 1.5}, "sessions_max"),
        # addresses
        ({"kafka": "localhost"}, "kafka: 'localhost' is not an address"),
        ({"kafka": "a:1,,b:2"}, "kafka: ''"),
        ({"kafka": "a:0"}, "port 0"),
        ({"kafka": "a:99999"}, "kafka"),
        ({"listen": "8470"}, "listen"),
        ({"listen": "::1:8470"}, "listen"),
        ({"listen": "127.0.0.1:http"}, "listen"),
        ({"listen": "a b:1"}, "listen"),
        ({"advertise": "proxy-1:8470"}, "advertise"),
        ({"advertise": "ftp://proxy-1"}, "advertise"),
        ({"advertise": "http://u:secret@proxy-1"}, "must not hold a user name"),
        ({"advertise": "http://proxy-1/path"}, "must end after host and port"),
        ({"advertise": "http://proxy-1:99999"}, "advertise"),
        ({"advertise": "http://["}, "advertise"),
        ({"advertise": "http://proxy..one:8470"}, "advertise"),
        ({"advertise": f"http://{'p' * 64}:8470"}, "advertise"),
        ({"topic_prefix": "a/b"}, "topic_prefix"),
        # listening in public
        (
            {"listen": "0.0.0.0:8470"},
            "set token_file, principals_file or tls_client_ca_file, or insecure",
        ),
        (
            {"listen": "[::]:8470"},
            "set token_file, principals_file or tls_client_ca_file, or insecure",
        ),
        (
            {"listen": "proxy-1:8470"},
            "set token_file, principals_file or tls_client_ca_file, or insecure",
        ),
        ({"token_file": "/nonexistent"}, "token_file /nonexistent: No such file"),
        # the advertised address
        ({"listen": "0.0.0.0:8470", "insecure": True}, "set advertise to the URL"),
        ({"listen": "[::]:8470", "insecure": True}, "like http://proxy-1:8470"),
        ({"advertise": "http://0.0.0.0:8470"}, "not an address that clients can call"),
        ({"advertise": "http://[::]:8470"}, "not an address that clients can call"),
        # groups' check URLs and secrets
        *(
            ({name: (entry,)}, f"{name} {entry!r} is not an address, a network")
            for name in ("check_url_allow", "check_url_deny")
            for entry in (
                "",
                "10.0.0.1/8",
                "10.0.0.0/33",
                "127.1",
                "0x7f000001",
                "2130706433",
                "a b",
                "*",
                "*.",
                "*.*.example",
                "orders.*",
                "orders:8080",
                "http://orders",
                "a/b",
                "[::1",
                "é",
                "::ffff:10.0.0.0/104",
            )
        ),
        ({"check_url_allow": ("private", "127.1")}, "check_url_allow '127.1' is not"),
        ({"secret_env_allow": ("TXBROKER_TOKEN",)}, "a variable of the proxy itself"),
        ({"secret_env_allow": ("txbroker_token",)}, "a variable of the proxy itself"),
        ({"secret_env_allow": ("shop:TXBROKER_TOKEN",)}, "a variable of the proxy itself"),
        *(
            ({"secret_env_allow": (entry,)}, "is no name of an environment variable")
            for entry in ("A=B", "shop:", ":SECRET", "sh\0p:SECRET")
        ),
        ({"secrets_dir": "/nonexistent"}, "secrets_dir /nonexistent is not a folder"),
        ({"secrets_dir": "/etc/passwd"}, "is not a folder"),
        ({"secrets_dir": "/"}, "holds more than secrets of groups"),
        ({"secrets_dir": "/proc/self"}, "holds more than secrets of groups"),
        # times
        ({"stuck_after_s": 2}, "stuck_after_s 2 is too short"),
        ({"session_timeout_s": 5}, "group.min.session.timeout.ms"),
        ({"session_timeout_s": 2000}, "group.max.session.timeout.ms"),
        ({"check_interval_s": 100_000}, "longer than half of half_retention_s"),
        ({"half_retention_s": 600}, "longer than half of half_retention_s"),
        ({"dedup_window_s": 5}, "too short"),
        ({"dedup_window_s": 700_000}, "dedup_window_s 700000 is longer"),
        # sizes
        ({"message_bytes_max": 8_000_000}, "message_bytes_max (8000000 bytes) must fit into"),
        ({"request_bytes_max": 1_000_000}, "request_bytes_max"),
        ({"session_in_flight_bytes_max": 1_000_000}, "session_in_flight_bytes_max"),
        ({"in_flight_bytes_max": 1_000_000}, "in_flight_bytes_max"),
        ({"session_in_flight_bytes_max": 20_000_000}, "what prepares may take (three quarters)"),
        (
            {
                "in_flight_bytes_max": 17_000_000,
                "session_in_flight_bytes_max": 17_000_000,
                "frame_bytes_max": 8_000_000,
            },
            "what prepares may take (three quarters)",
        ),
        ({"bodies_bytes_max": 1_000_000}, "must fit into bodies_bytes_max"),
        ({"pending_group_max": 600_000}, "pending_group_max 600000 is more than pending_max"),
        ({"pending_max": 10, "pending_group_max": 11}, "one group cannot hold more than all"),
        ({"snapshot_records_min": 0}, "snapshot_records_min"),
        ({"frame_bytes_max": 20_000_000}, "that SDKs and proxies agree on"),
        # Kafka's security
        ({"kafka_security_protocol": "TLS"}, "'SSL'"),
        ({"kafka_security_protocol": "SASL_SSL"}, "needs kafka_sasl_username"),
        ({"kafka_sasl_username": "me"}, "need kafka_security_protocol"),
        ({"kafka_ssl_ca_file": "/nonexistent"}, "needs kafka_security_protocol"),
        (
            {"kafka_security_protocol": "SSL", "kafka_ssl_ca_file": "/nonexistent"},
            "kafka_ssl_ca_file /nonexistent: no such file",
        ),
    ],
)
def test_contradictions_are_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    assert words in refused(options)


def test_certificate_needs_its_key(tmp_path: Path) -> None:
    pem = tmp_path / "pem"
    pem.touch()
    options = {"kafka_security_protocol": "SSL", "kafka_ssl_cert_file": pem}
    assert "belong together" in refused(options)
    assert load_settings({**options, "kafka_ssl_key_file": pem}, environ={}).kafka_ssl_key_file


def test_all_mistakes_are_reported_together() -> None:
    message = refused({"partitions": 0, "pending_max": 0})
    assert "partitions" in message
    assert "pending_max" in message
    assert "pending_group_max" not in message


@pytest.mark.parametrize(("pending", "group"), [(250_000, 200_000), (10, 8), (1, 1)])
def test_one_group_leaves_a_fifth_to_others(pending: int, group: int) -> None:
    assert load_settings({"pending_max": pending}, environ={}).pending_group_max == group


@pytest.mark.parametrize(
    ("partitions", "each"), [(1, 1_000_000), (None, 500_000), (4, 250_000), (64, 250_000)]
)
def test_a_million_pending_fit_by_default(partitions: int | None, each: int) -> None:
    given = {} if partitions is None else {"partitions": partitions}
    assert load_settings(given, environ={}).pending_max == each


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("10.1.2.3:8470", "http://10.1.2.3:8470"),
        ("proxy-1:8470", "http://proxy-1:8470"),
        ("[fd00::1]:8470", "http://[fd00::1]:8470"),
    ],
)
def test_listen_address_is_advertised(listen: str, url: str) -> None:
    settings = load_settings({"listen": listen, "insecure": True}, environ={})
    assert settings.advertise_url == url


def test_public_addresses_need_a_token_or_insecure(tmp_path: Path) -> None:
    token = tmp_path / "token"
    secret_file(token, "s3cret-of-everybody\n")
    for options in ({"token_file": token}, {"insecure": True}):
        named = {"listen": "0.0.0.0:8470", "advertise": "http://proxy-1:8470"}
        settings = load_settings({**named, **options}, environ={})
        assert settings.listen_address.public
        assert "s3cret" not in repr(settings)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:1", "[::1]:8470", "127.8.8.8:1"])
def test_loopback_needs_none(listen: str) -> None:
    assert not load_settings({"listen": listen}, environ={}).listen_address.public


def test_secrets_stand_in_files_and_never_in_repr(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("hunter2\n")
    options = {
        "kafka_security_protocol": "SASL_SSL",
        "kafka_sasl_mechanism": "SCRAM-SHA-512",
        "kafka_sasl_username": "me",
        "kafka_sasl_password_file": password,
    }
    settings = load_settings(options, environ={})
    assert settings.kafka_secret("kafka_sasl_password") == "hunter2"
    assert "hunter2" not in repr(settings) + str(settings.model_dump())

    password.write_text("\n")
    assert "is empty" in refused(options)
    password.write_bytes(b"\xff")
    assert "is not text" in refused(options)


def test_addresses_and_their_urls() -> None:
    assert parse_address("[::1]:8470").url_of(secure=False) == "http://[::1]:8470"
    assert parse_address("proxy-1:80") == Address("proxy-1", 80)


@pytest.mark.parametrize(
    ("kafka", "servers"),
    [
        ("::1", ["[::1]:9092"]),
        ("[::1]", ["[::1]:9092"]),
        ("[::1]:9093, kafka:1,127.0.0.1:2", ["[::1]:9093", "kafka:1", "127.0.0.1:2"]),
        ("2001:db8::a", ["[2001:db8::a]:9092"]),
        ("1:2:3:4:5:6:7:8", ["[1:2:3:4:5:6:7:8]:9092"]),
    ],
)
def test_kafka_servers_may_be_ipv6_addresses(kafka: str, servers: list[str]) -> None:
    assert load_settings({"kafka": kafka}, environ={}).kafka == kafka
    assert list(map(str, parse_servers(kafka))) == servers


@pytest.mark.parametrize(
    ("kafka", "sentence"),
    [
        ("::1:9092", r"it could end with a port: write \[::1\]:9092, or \[::1:9092\]:9092"),
        ("[::1]:0", "has port 0"),
        ("[::1", "is not an address"),
        ("[kafka]:9092", "is not an address"),
        ("localhost", "is not an address: expected host:port$"),
    ],
)
def test_doubtful_kafka_servers_are_refused(kafka: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=f"kafka: .*{sentence}"):
        load_settings({"kafka": kafka}, environ={})


def test_an_ipv6_address_to_listen_at_needs_brackets_and_a_port() -> None:
    with pytest.raises(ConfigurationError, match=r"such as \[::1\]:PORT"):
        load_settings({"listen": "::1"}, environ={})


def test_advertise_has_one_spelling() -> None:
    settings = load_settings({"advertise": "http://proxy-1:8470/"}, environ={})
    assert settings.advertise == settings.advertise_url == "http://proxy-1:8470"


def test_missing_secret_names_its_setting() -> None:
    with pytest.raises(ConfigurationError, match="my_file /nonexistent"):
        read_secret("my_file", Path("/nonexistent"))


def test_the_old_name_of_settled_bytes_max_counts_rows_of_all_half_partitions() -> None:
    assert load_settings({"insecure": True}, environ={}).settled_bytes_max == 512 * 1024 * 1024
    few = load_settings(environ={"TXBROKER_SETTLED_MAX": "1000"})
    assert few.settled_bytes_max == 1000 * 4 * 37
    given = {"TXBROKER_SETTLED_MAX": "1000", "TXBROKER_PARTITIONS": "8"}
    settings = load_settings(environ=given)
    assert settings.settled_bytes_max == 1000 * 8 * 37
    assert settings.renamed == {"settled_max": "settled_bytes_max"}
    both = load_settings(environ={**given, "TXBROKER_SETTLED_BYTES_MAX": "5"})
    assert both.settled_bytes_max == 5
    assert load_settings({"settled_bytes_max": 7}, environ={}).renamed == {}
