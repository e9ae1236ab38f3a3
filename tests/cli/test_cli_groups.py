"""`txbroker groups`."""

from __future__ import annotations

from tests.kit.cli import Call


def test_register_show_list_and_remove(ask: Call) -> None:
    url = "http://127.0.0.1:9/check"
    done = ask("groups", "register", "g1", "--check-url", url, "--timeout-s", "2", "--yes")
    assert (done.code, done.err) == (0, "")
    shown = ask("groups", "show", "g1", "-o", "json").json
    assert shown == {"group": "g1", "sessions": 0, "check_url": url, "timeout_s": 2.0}
    header, row = ask("groups", "list", "-o", "wide").out.splitlines()
    assert header.split()[:3] == ["GROUP", "CHECK", "URL"]
    assert row.split() == ["g1", url, "-", "0", "-/-/-/2", "-", "-"]
    removed = ask("groups", "remove", "g1", "g2", "--yes")
    assert (removed.code, removed.out) == (3, "g1\n")
    assert "g2: " in removed.err
    assert "(unknown_group)" in removed.err
    assert ask("groups", "list") == (0, "", "No group is registered.\n")


def test_invalid_registration_is_refused(ask: Call) -> None:
    refused = ask("groups", "register", "g3", "--check-url", "nowhere", "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert "(bad_request)" in refused.err
    assert ask("groups", "show", "g3").code == 1


def test_group_name_may_have_any_printable_text(ask: Call) -> None:
    assert ask("groups", "register", "a/b ?#ü", "--yes").code == 0
    assert ask("groups", "show", "a/b ?#ü", "-o", "json").json["group"] == "a/b ?#ü"
    assert ask("groups", "remove", "a/b ?#ü", "--yes").out == "a/b ?#ü\n"
