"""The principals file: what is read, what is refused, and what the command writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.secret_files import secret_file
from txbroker import principals
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.config.settings import load_settings
from txbroker.errors import ConfigurationError, NotPermitted, Unauthorized
from txbroker.principals import (
    ANYBODY,
    Patterns,
    Principal,
    Role,
    digest_of,
    make_token,
    no_principals,
    read_principals,
)
from txbroker.proxy.http.guards import Credential, Guard

DIGEST = digest_of("x" * 20)
PRODUCER = f'role = "producer"\ntoken_sha256 = "{DIGEST}"\ngroups = ["g"]\ntopics = ["t"]\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x", "is not TOML"),
        ("shop = 1", r"each principal is a table \[principals.NAME\]"),
        ("principals = 1", r"each principal is a table \[principals.NAME\]"),
        ('[principals."a b"]\n' + PRODUCER, "'a b' is no principal's name"),
        ("[principals.token_file]\n" + PRODUCER, "is no principal's name"),
        ("[principals.a]\n" + PRODUCER + "color = 1", "principal a: .*color"),
        ("[principals.a]\n" + PRODUCER.replace("producer", "king"), "principal a: .*king"),
        ('[principals.a]\nrole = "viewer"', "principal a has no credential"),
        ("[principals.a]\n" + PRODUCER.replace(DIGEST, "secret"), "never the token itself"),
        ("[principals.a]\n" + PRODUCER.replace('groups = ["g"]\n', ""), "a producer needs groups"),
        ("[principals.a]\n" + PRODUCER.replace('topics = ["t"]\n', ""), "a producer needs topics"),
        ("[principals.a]\n" + PRODUCER + "expires = 'soon'", "principal a: "),
        (f"[principals.a]\n{PRODUCER}[principals.b]\n{PRODUCER}", "a and b have the same token"),
        ("[principals.a]\n" + "#" * (1 << 20), "is larger than"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "principals.toml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=f"principals_file .*{words}"):
        read_principals(path)


def producer(name: str, groups: str, *more: str) -> str:
    digest = digest_of(f"the token of {name}")
    lines = ['role = "producer"', f'token_sha256 = "{digest}"', f"groups = {groups}"]
    return "\n".join([f"[principals.{name}]", *lines, 'topics = ["t"]', *more]) + "\n"


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("shop", "shop"),
        ("shop-7", "shop"),
        ("bank-7", "bank"),
        ("both-7", "shop"),  # the first one of the file
        ("gone", "gone"),  # expired, its transactions are still there
        ("else", "all"),
        ("closed", None),
        ("ada's", None),
        ("shop\u0440", "all"),
    ],
)
def test_whose_a_group_is(tmp_path: Path, group: str, name: str | None) -> None:
    path = tmp_path / "principals.toml"
    deny = 'deny_groups = ["closed", "ada*"]'
    path.write_text(
        f'[principals.ada]\nrole = "operator"\ntoken_sha256 = "{DIGEST}"\n'
        + producer("all", '["**"]', deny)
        + producer("shop", '["shop", "shop-*", "both-*"]')
        + producer("bank", '["bank-*", "both-*"]')
        + producer("gone", '["gone"]', "expires = 2020-01-01T00:00:00Z")
    )
    found = read_principals(path)
    for _ in range(2):
        assert found.share_of(group) == (group if name is None else f"\n{name}")


def test_without_principals_each_group_is_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(principals, "SHARES_KNOWN_MAX", 3)
    groups = [f"g{number}" for number in range(10)]
    assert [no_principals().share_of(group) for group in groups] == groups


@pytest.mark.parametrize("mode", [0o646, 0o664, 0o620])
def test_a_file_that_other_users_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "principals.toml"
    path.write_text(f"[principals.a]\n{PRODUCER}")
    path.chmod(mode)
    refused = rf"can be written by other users \(mode {mode:04o}\): run `chmod go-w {path}`"
    with pytest.raises(ConfigurationError, match=refused):
        read_principals(path)
    path.chmod(mode & ~0o022)
    assert [one.name for one in read_principals(path)] == ["a"]


def test_several_tokens_and_certificates_identify_one(tmp_path: Path) -> None:
    path = tmp_path / "principals.toml"
    other = digest_of("y" * 20)
    both = f'token_sha256 = ["{DIGEST}", "{other}"]\ncertificate = ["c1", "c2"]'
    path.write_text(f"[principals.a]\n{PRODUCER}".replace(f'token_sha256 = "{DIGEST}"', both))
    found = read_principals(path)
    (principal,) = found
    assert found.by_digest(DIGEST) is found.by_digest(other) is principal
    assert found.by_certificate(["unknown", "c2"]) is found.by_certificate(["c1"]) is principal
    assert found.by_digest(digest_of("z")) is None
    assert found.by_certificate(["*"]) is None


def test_who_expires_is_nobody_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "principals.toml"
    for year, known in ((2000, False), (2999, True)):
        path.write_text(f"[principals.a]\n{PRODUCER}expires = {year}-01-01T00:00:00Z\n")
        found = read_principals(path)
        assert (found.by_digest(DIGEST) is not None) is known
        assert (found.by_name("a") is not None) is known
        assert found.by_name("a", expired=True) is not None


@pytest.mark.parametrize(
    ("allow", "deny", "inside", "outside"),
    [
        (["*"], [], ["a", "", "x/y"], []),
        (["a"], [], ["a"], ["A", "a ", "aa", "a\n", ""]),
        (["a-*", "b?"], [], ["a-", "a-1", "bc"], ["a", "b", "bcd", "-a-"]),
        (["a*"], ["a-secret*"], ["a", "a-secre"], ["a-secret", "a-secret-2"]),
        (["*"], ["a"], ["b"], ["a"]),
        (["a", "**"], [], ["a", "b", ""], []),
        (["a***b"], [], ["ab", "a-b"], ["a"]),
        ([], [], [], ["a", ""]),
        (["a.b"], [], ["a.b"], ["axb"]),
        (["*"], ["pay[eu]"], ["paye", "pay"], ["pay[eu]"]),
        (["pay[eu]*"], [], ["pay[eu]", "pay[eu]-1"], ["paye"]),
    ],
)
def test_patterns(allow: list[str], deny: list[str], inside: list[str], outside: list[str]) -> None:
    patterns = Patterns(allow, deny)
    assert [name for name in inside if name not in patterns] == []
    assert [name for name in outside if name in patterns] == []
    assert patterns.everything is (not outside)


def test_who_acts_is_the_principal() -> None:
    named, shared = Principal("ada"), Principal("token_file", shared=True)
    assert named.by("http 10.0.0.1", "mallory") == "ada"
    assert shared.by("http 10.0.0.1") == "token_file via http 10.0.0.1"
    assert shared.by("console 10.0.0.1", "ada") == "token_file (ada) via console 10.0.0.1"
    assert ANYBODY.by("http 10.0.0.1", "ada") == "ada via http 10.0.0.1"
    assert ANYBODY.by("http 10.0.0.1") == "http 10.0.0.1"


def test_what_is_not_allowed_is_refused_in_a_sentence() -> None:
    viewer = Principal("eve", Role.VIEWER, Patterns(["a"]), Patterns(["t"]))
    with pytest.raises(NotPermitted, match="'eve' is a viewer, and this call takes the role oper"):
        viewer.check_role([Role.OPERATOR])
    with pytest.raises(NotPermitted, match="may not act for group 'b'"):
        viewer.check_group("b")
    with pytest.raises(NotPermitted, match="may not write topic 'u'"):
        viewer.check_topics(["t", "u"])
    with pytest.raises(NotPermitted, match="another producer group") as refused:
        viewer.check_own("b")
    assert "'b'" not in str(refused.value)


@pytest.mark.parametrize("name", ["token_file", "peer_secret_file"])
def test_a_principals_token_is_no_other_secret(tmp_path: Path, name: str) -> None:
    secret = secret_file(tmp_path / "secret", "x" * 20)
    path = tmp_path / "principals.toml"
    path.write_text(f"[principals.a]\n{PRODUCER}")
    with pytest.raises(ConfigurationError, match=f"{name} and principal a hold the same"):
        load_settings({"principals_file": path, name: secret}, environ={})


def test_a_secret_that_becomes_another_roles_is_not_taken(tmp_path: Path) -> None:
    files = {
        name: secret_file(tmp_path / name, f"the secret of {name}")
        for name in ("token_file", "admin_token_file")
    }
    settings = load_settings({"admin_listen": "127.0.0.1:0", **files}, environ={})
    guard = Guard(settings, admin=True)
    producers = Credential(digest_of("the secret of token_file"), ())
    secret_file(files["admin_token_file"], "the secret of token_file")
    with pytest.raises(Unauthorized):
        guard.known(producers)
    assert guard.known(Credential(digest_of("the secret of admin_token_file"), ()))


# --- the command -----------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run `txbroker principals` and return its exit code, stdout and stderr."""
    code = run(cli, ["principals", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_token_is_shown_once_and_its_digest_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "principals.toml"
    file = ("--principals-file", str(path))
    words = ("--group", "shop*", "--topic", "orders", "--deny-topic", "orders.x")
    code, out, _ = command(capsys, "add", "shop", *words, *file)
    token = out.strip()
    assert (code, len(token)) == (0, len(make_token()))
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    shop = read_principals(path).by_digest(digest_of(token))
    assert shop is not None
    assert (shop.name, shop.role, "shop-1" in shop.groups) == ("shop", Role.PRODUCER, True)
    assert ("orders" in shop.topics, "orders.x" in shop.topics) == (True, False)

    code, out, _ = command(
        capsys, "add", "b.c@d", "--role", "viewer", "--certificate", 'C"\\N', "--expires",
        "2999-01-01", *file,
    )  # fmt: skip
    assert (code, out) == (0, "")
    certified = read_principals(path).by_certificate(['C"\\N'])
    assert certified is not None
    assert certified.expires_s is not None
    assert certified.expires_s > time.time()
    code, out, _ = command(capsys, "list", "-o", "json", *file)
    assert code == 0
    assert ['"shop"' in out, '"b.c@d"' in out, token in out] == [True, True, False]


def test_commands_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    target, link = tmp_path / "kept.toml", tmp_path / "link.toml"
    link.symlink_to(target)
    script = "from txbroker.cli.main import main; main()"
    words = [sys.executable, "-c", script, "principals", "add"]
    running = [
        subprocess.Popen(
            [*words, f"p{number}", "--role", "viewer", "--principals-file", str(link)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(4)
    ]
    tokens = [process.communicate(timeout=60)[0].strip() for process in running]
    assert link.is_symlink()
    found = read_principals(target)
    assert all(found.by_digest(digest_of(token)) is not None for token in tokens)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("shop", "--group", "g", "--topic", "t"), "is already in"),
        (("x",), "a producer needs groups"),
        (("a b", "--role", "viewer"), "no principal's name"),
        (("x", "--role", "king"), "king"),
    ],
)
def test_what_cannot_be_added_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    path = tmp_path / "principals.toml"
    path.write_text(f"# a remark\n[principals.shop]\n{PRODUCER}")
    before = path.read_bytes()
    code, out, err = command(capsys, "add", *words, "--principals-file", str(path))
    assert (code != 0, out) == (True, "")
    assert re.search(says, err), err
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["principals.toml"]
