"""The doctor reports each unsafe setting, and no safe one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.kit.doctor import NOW_S, ONE, TWO, World, settings
from txbroker.cli.doctor.findings import CheckLevel
from txbroker.cli.doctor.subject import NotAllowed
from txbroker.contract.groups import GroupAnswer
from txbroker.principals import Role, format_principal

OK, WARNING, UNKNOWN, FAILS = (
    CheckLevel.OK,
    CheckLevel.WARNING,
    CheckLevel.UNKNOWN,
    CheckLevel.FAILS,
)
PUBLIC: dict[str, Any] = {"listen": "0.0.0.0:8470", "advertise": "https://one:8470"}
TOKEN = Path("token")
PRINCIPALS = Path("principals.toml")
CERTIFICATE: dict[str, Any] = {"tls_cert_file": Path("crt"), "tls_key_file": Path("key")}
DAY_S = 86400


OPEN = "takes calls without a credential"
ONE_TOKEN = "one token for all callers"
NO_ADMIN = "token_file without admin_listen"


@pytest.mark.parametrize(
    ("check", "given", "words"),
    [
        ("credentials", {"insecure": True}, [f"listen 0.0.0.0:8470 {OPEN}"]),
        (
            "credentials",
            {"insecure": True, "admin_listen": "[::]:8471", "peer_listen": "10.0.0.1:1"},
            [f"{one} {OPEN}" for one in ("0.0.0.0:8470", "admin_listen [::]:8471", "10.0.0.1:1")],
        ),
        ("credentials", {"token_file": TOKEN}, []),
        ("credentials", {"principals_file": PRINCIPALS}, []),
        ("credentials", {"tls_client_ca_file": Path("ca")}, []),
        (
            "credentials",
            {"token_file": TOKEN, "peer_listen": "10.0.0.1:1"},
            [f"peer_listen 10.0.0.1:1 {OPEN}"],
        ),
        ("credentials", {"insecure": True, "listen": "127.0.0.1:8470"}, []),
        (
            "credentials",
            {"listen": "127.0.0.1:1", "admin_listen": "0.0.0.0:2", "admin_token_file": TOKEN},
            [],
        ),
        ("shared-token", {"token_file": TOKEN}, [ONE_TOKEN, NO_ADMIN]),
        ("shared-token", {"token_file": TOKEN, "admin_listen": "0.0.0.0:1"}, [ONE_TOKEN]),
        ("shared-token", {"token_file": TOKEN, "principals_file": PRINCIPALS}, [NO_ADMIN]),
        (
            "shared-token",
            {"token_file": TOKEN, "principals_file": PRINCIPALS, "admin_listen": "0.0.0.0:1"},
            [],
        ),
        ("shared-token", {"principals_file": PRINCIPALS}, []),
        (
            "shared-token",
            {"tls_client_ca_file": Path("ca")},
            ["tls_client_ca_file without principals_file"],
        ),
        ("shared-token", {"tls_client_ca_file": Path("ca"), "principals_file": PRINCIPALS}, []),
        ("shared-token", {"token_file": TOKEN, "listen": "127.0.0.1:8470"}, []),
        (
            "kafka",
            {"kafka": "k1:9092, k2:9092", "kafka_security_protocol": "SASL_PLAINTEXT"},
            [f"SASL_PLAINTEXT with PLAIN to {one}:9092: messages" for one in ("k1", "k2")],
        ),
        ("kafka", {"kafka": "localhost:9092", "kafka_security_protocol": "SASL_PLAINTEXT"}, []),
        ("kafka", {"kafka": "k1:9092", "kafka_security_protocol": "SASL_SSL"}, []),
        (
            "kafka",
            {"kafka": "k1:9092,localhost:9092", "kafka_security_protocol": "PLAINTEXT"},
            ["PLAINTEXT to k1:9092: messages can be read and changed on the network, and"],
        ),
        ("kafka", {"kafka": "localhost:9092", "kafka_security_protocol": "PLAINTEXT"}, []),
        ("kafka", {"kafka": "k1:9092", "kafka_security_protocol": "SSL"}, []),
        ("peers", {"token_file": TOKEN}, ["2 proxies, and neither"]),
        ("peers", {"insecure": True}, ["2 proxies, and neither"]),
        ("peers", {"token_file": TOKEN, "peer_secret_file": Path("peers")}, []),
        ("peers", {"tls_client_ca_file": TOKEN, "peer_names": ("proxy-*",)}, []),
    ],
)
async def test_unsafe_settings(
    world: World, check: str, given: dict[str, Any], words: list[str]
) -> None:
    world.settings = settings(**PUBLIC | given)
    found = await world.outcome(f"access-{check}")
    assert found.level is (WARNING if words else OK)
    assert len(found.details) == len(words)
    for line, word in zip(found.details, words, strict=True):
        assert word in line


async def test_one_proxy_needs_no_peer_identity(world: World) -> None:
    world.settings = settings(**PUBLIC, token_file=TOKEN)
    view = world.proxies.seen
    world.proxies.view = structs.replace(view, proxies=view.proxies[:1])
    assert (await world.outcome("access-peers")).level is OK


async def test_loopback_settings_are_not_judged(world: World) -> None:
    for name in ("access-credentials", "access-shared-token", "access-peers"):
        found = await world.outcome(name)
        assert (found.level, "give the doctor the proxy's settings" in found.found) == (OK, True)


def principals(path: Path, *tables: tuple[str, Role, dict[str, list[str]], int | None]) -> Path:
    """Write a principals file; the last of a table is when it expires, seconds from now."""
    path.write_text(
        "".join(
            format_principal(
                name,
                role,
                digest=f"{number:064x}",
                certificates=(),
                patterns=patterns,
                expires=None if after_s is None else datetime.fromtimestamp(NOW_S + after_s, UTC),
            )
            for number, (name, role, patterns, after_s) in enumerate(tables)
        )
    )
    return path


async def test_expiring_and_broad_principals_are_warnings(world: World, tmp_path: Path) -> None:
    some = {"groups": ["shop"], "topics": ["orders"]}
    every = {"groups": ["**"], "topics": ["***"]}
    world.settings = settings(
        principals_file=principals(
            tmp_path / "principals.toml",
            ("gone", Role.PRODUCER, some, -2 * DAY_S),
            ("soon", Role.VIEWER, {}, 13 * DAY_S),
            ("later", Role.VIEWER, {}, 15 * DAY_S),
            ("every", Role.PRODUCER, every, None),
            ("one-topic", Role.PRODUCER, {**every, "topics": ["a"]}, None),
            ("one-group", Role.PRODUCER, {**every, "groups": ["a"]}, None),
            ("all-but-one", Role.PRODUCER, {**every, "deny_topics": ["a"]}, None),
            ("boss", Role.OPERATOR, {"groups": ["shop"]}, None),
            ("shops", Role.PRODUCER, {**some, "groups": ["shop*"]}, None),
            ("shop-1", Role.PRODUCER, {**some, "groups": ["web", "shop-1*"]}, None),
        )
    )
    found = await world.outcome("access-principals")
    assert found.level is WARNING
    gone, soon, every_line, *counted = found.details
    assert gone.startswith("gone expired ")
    assert soon.startswith("soon expires in ")
    assert every_line == "every is a producer of every group and topic"
    assert counted == [
        f"{name}: groups {pattern} are counted to {first}, the first producer that may act for them"
        for name, pattern, first in (
            ("one-topic", "*", "every"),
            ("all-but-one", "*", "every"),
            ("shop-1", "shop-1*", "shops"),
        )
    ]


@pytest.mark.parametrize(
    ("producers", "variables", "shared"),
    [
        (2, ("SHOP", "bank:BANK", "EU"), ("SHOP", "EU")),
        (2, ("shop:SHOP", "of:a:team:TEAM"), ()),
        (1, ("SHOP",), ()),
    ],
)
async def test_secret_variables_of_several_producers(
    world: World,
    tmp_path: Path,
    producers: int,
    variables: tuple[str, ...],
    shared: tuple[str, ...],
) -> None:
    some = {"groups": ["shop"], "topics": ["orders"]}
    tables = [(f"team-{n}", Role.PRODUCER, some, None) for n in range(producers)]
    path = principals(tmp_path / "p", *tables, ("boss", Role.OPERATOR, {}, None))
    world.settings = settings(principals_file=path, secret_env_allow=variables)
    assert await world.seen("access-secret-variables") == (
        WARNING if shared else OK,
        tuple(f"secret_env_allow has {one} for the groups of all 2 producers" for one in shared),
    )


async def test_valid_principals_are_ok(world: World, tmp_path: Path) -> None:
    some = {"groups": ["shop"], "topics": ["orders"]}
    path = principals(tmp_path / "p", ("shop", Role.PRODUCER, some, 30 * DAY_S))
    world.settings = settings(principals_file=path)
    found = await world.outcome("access-principals")
    assert (found.level, found.found) == (OK, "nothing unsafe")


async def test_unreadable_principals_break_no_other_check(world: World, tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text("nonsense")
    world.settings = settings(principals_file=path)
    found = await world.outcome("access-principals")
    assert found.level is FAILS
    assert "is not TOML" in found.found


@pytest.mark.parametrize(
    ("name", "mode", "folder", "words"),
    [
        ("token_file", 0o600, 0o755, ""),
        ("token_file", 0o440, 0o755, ""),
        ("token_file", 0o604, 0o755, "has mode 0604: others can read or change it"),
        ("admin_token_file", 0o644, 0o755, "has mode 0644: others can read or change it"),
        ("peer_secret_file", 0o620, 0o755, "has mode 0620: others can read or change it"),
        ("tls_key_file", 0o644, 0o755, "has mode 0644: others can read or change it"),
        ("tls_cert_file", 0o666, 0o755, ""),
        ("peers_ca_file", 0o644, 0o755, ""),
        ("kafka_sasl_password_file", 0o644, 0o755, "has mode 0644: others can read or change it"),
        ("kafka_ssl_key_file", 0o644, 0o755, "has mode 0644: others can read or change it"),
        ("principals_file", 0o644, 0o755, ""),
        ("principals_file", 0o644, 0o777, "is in a folder that every user may write: others can"),
        ("principals_file", 0o644, 0o1777, ""),
    ],
)
async def test_files_open_to_other_users_are_warnings(
    world: World, tmp_path: Path, name: str, mode: int, folder: int, words: str
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder/file"
    path.write_text("")
    path.chmod(mode)
    path.parent.chmod(folder)
    world.settings = settings(**{name: path})
    found = await world.outcome("access-files")
    assert found.level is (WARNING if words else OK)
    assert [line[: len(f"{name} {path} {words}")] for line in found.details] == (
        [f"{name} {path} {words}"] if words else []
    )


async def test_missing_secret_file_is_reported(world: World, tmp_path: Path) -> None:
    world.settings = settings(tls_key_file=tmp_path / "none")
    found = await world.outcome("access-files")
    assert found.level is WARNING
    assert "not readable: No such file" in found.details[0]


@pytest.mark.parametrize(
    ("entry", "level"),
    [
        ("127.0.0.1", WARNING),
        ("127.0.0.0/8", WARNING),
        ("0.0.0.0/0", WARNING),
        ("[::1]", WARNING),
        ("::/0", WARNING),
        ("169.254.169.254", WARNING),
        ("fe80::/10", WARNING),
        ("fd00:ec2::254", WARNING),
        ("LOCALHOST", WARNING),
        ("*.localhost", WARNING),
        ("metadata.google.internal", WARNING),
        ("Metadata.Google.Internal.", WARNING),
        ("instance-data.ec2.internal", WARNING),
        ("100.100.100.200", WARNING),
        ("0.0.0.0", WARNING),
        ("*.google.internal", OK),
        ("metadata.example", OK),
        ("10.1.0.0/16", OK),
        ("orders.example", OK),
        ("*.example", OK),
        ("localhost.example", OK),
    ],
)
async def test_check_urls_to_inside_are_warnings(
    world: World, entry: str, level: CheckLevel
) -> None:
    world.settings = settings(check_url_allow=("10.2.0.1", entry))
    found = await world.outcome("access-check-urls")
    assert found.level is level
    assert found.details == (() if level is OK else (f"check_url_allow has {entry}",))


# --- with the proxies ------------------------------------------------------------------------


def moved(world: World, proxy: str, url: str) -> None:
    """Let a proxy be called at another URL."""
    world.proxies.proxy(proxy, url=url)
    world.proxies.pages[url] = world.proxies.pages[proxy]


async def test_pages_open_without_credential_are_warnings(world: World) -> None:
    world.proxies.open = {(ONE, "/metrics"), (TWO, "/v1/overview")}
    found = await world.outcome("access-open")
    assert found.level is WARNING
    assert found.details == (
        f"{ONE}/metrics answers without a credential",
        f"{TWO}/v1/overview answers without a credential",
    )


async def test_pages_on_loopback_are_not_tested(world: World) -> None:
    for url, own in ((ONE, "http://127.0.0.1:8470"), (TWO, "http://[::1]:8470")):
        moved(world, url, own)
        world.proxies.open |= {(own, "/metrics")}
    assert (await world.outcome("access-open")).level is OK


@pytest.mark.parametrize(
    ("given", "url", "details"),
    [
        (PUBLIC | CERTIFICATE, TWO, ()),
        ({}, "http://127.0.0.1:8470", ()),
        ({}, "http://two:8470", ("http://two:8470 is called without TLS",)),
        (PUBLIC, TWO, ("listen 0.0.0.0:8470 takes calls without TLS",)),
        (
            PUBLIC
            | {"listen": "127.0.0.1:1", "peer_listen": "0.0.0.0:2"}
            | {"peer_secret_file": TOKEN},
            TWO,
            (
                "peer_listen 0.0.0.0:2 takes calls without TLS",
                "peer_secret_file without tls_cert_file: the secret is sent unencrypted",
            ),
        ),
        ({"peer_secret_file": TOKEN}, TWO, ()),
    ],
)
async def test_unencrypted_traffic_is_a_warning(
    world: World, given: dict[str, Any], url: str, details: tuple[str, ...]
) -> None:
    world.settings = settings(**given)
    moved(world, TWO, url)
    assert await world.seen("access-tls") == (WARNING if details else OK, details)


# --- what a credential does not allow --------------------------------------------------------


async def test_missing_role_makes_checks_unknown(world: World) -> None:
    denied = NotAllowed("https://one:8470 answered /v1/overview with 403: (not_permitted)")
    world.proxies.view = denied
    world.proxies.pages = dict.fromkeys(world.proxies.pages, denied)
    report = await world.examine()
    by_name = {one.name: one for one in report.outcomes}
    assert {name for name, one in by_name.items() if one.level is FAILS} == set()
    for name in ("proxies-ready", "groups-reachable", "parked", "undecided-lost", "access-open"):
        assert by_name[name].level is UNKNOWN
        assert by_name[name].found == f"not known: {denied}"
    assert by_name["kafka-reachable"].level is OK
    assert not report.healthy


async def test_viewer_reports_skipped_test_calls(world: World) -> None:
    world.proxies.tests["web"] = NotAllowed("the role viewer (not_permitted)")
    found = await world.outcome("groups-reachable")
    assert (found.level, found.found) == (UNKNOWN, "not known: 1 of 2 were not tested")
    line = "web: its check URL was not tested: the role viewer (not_permitted)"
    assert found.details == (line,)
    world.proxies.group("web", unreachable_since_ms=0, unreachable_why="refused")
    found = await world.outcome("groups-reachable")
    assert found.level is WARNING
    assert "web: its check URL fails, for " in found.details[0]
    assert found.details[0].endswith(": refused")
    assert found.details[1] == line


async def test_unusable_policies_fail(world: World) -> None:
    world.proxies.registered = [
        GroupAnswer(
            group="web", sessions=0, check_url="http://web/check", problem="secrets_dir is not set"
        ),
        GroupAnswer(group="orders", sessions=0),
    ]
    found = await world.outcome("groups-usable")
    assert (found.level, found.found) == (FAILS, "1 of 2 cannot be used")
    assert found.details == ("web: secrets_dir is not set",)
    world.proxies.registered = [GroupAnswer(group="web", sessions=0, check_url="http://web/check")]
    assert (await world.outcome("groups-usable")).level is OK


async def test_check_url_beside_instances_is_a_warning(world: World) -> None:
    """What answers at the URL decides for instances that died."""
    url = "http://web/check"
    for group, level in (
        (GroupAnswer(group="web", sessions=2, check_url=url), WARNING),
        (GroupAnswer(group="web", sessions=2, check_url=url, signed_answers=True), OK),
        (GroupAnswer(group="web", sessions=0, check_url=url), OK),
    ):
        world.proxies.registered = [group]
        found = await world.outcome("groups-usable")
        assert found.level is level
        assert bool(found.details) is (level is WARNING)
        assert all(line.startswith(f"web: its check URL {url} decides") for line in found.details)
