"""Registered groups: validation, storage and changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kit.fake_service import FakeStore
from txbroker.checkers.groups import Groups
from txbroker.contract.policy import (
    GroupPolicy,
    PolicyError,
    check_group_name,
    decode_policy,
    encode_policy,
)
from txbroker.core.records import CheckPolicy

FULL = {
    "check_url": "https://orders.example:8443/check?x=1",
    "secret_ref": "env:ORDERS_SECRET",
    "check_after_s": 1.5,
    "check_interval_s": 10.0,
    "attempts_max": 5,
    "timeout_s": 2.0,
    "parallel": 4,
    "answer_bytes_max": 1_000_000,
}


def decode(fields: dict[str, Any]) -> GroupPolicy:
    return decode_policy(json.dumps({"v": 1, **fields}).encode())


def test_encoded_policy_decodes_to_itself() -> None:
    policy = decode(FULL)
    assert json.loads(encode_policy(policy)) == {"v": 1, **FULL}
    assert decode_policy(encode_policy(policy)) == policy
    assert encode_policy(policy).startswith(b'{"v":1,')
    assert decode_policy(encode_policy(GroupPolicy())) == GroupPolicy()
    assert decode(dict.fromkeys(FULL)) == GroupPolicy()


def test_unset_policy_fields_follow_configuration() -> None:
    default = CheckPolicy(6, 30, 15, 5)
    assert GroupPolicy().checks(default) == default
    assert decode(FULL).checks(default) == CheckPolicy(1.5, 10, 5, 2)
    assert GroupPolicy(check_after_s=0.0).checks(default) == CheckPolicy(0, 30, 15, 5)


@pytest.mark.parametrize(
    ("obj", "sentence"),
    [
        ({"url": "http://x"}, "unknown field `url`"),
        ({"check_url": 5}, "check_url: expected `str | null`, got `int`"),
        ({"check_url": "ftp://x/"}, "check_url must begin with http:// or https://"),
        ({"check_url": "/check"}, "check_url must begin with http:// or https://"),
        ({"check_url": "http:///check"}, "check_url must name a host"),
        ({"check_url": "http://x:0/"}, "check_url must name a host, and a port other than 0"),
        ({"check_url": "http://x:port/"}, "its host or port is malformed"),
        ({"check_url": "http://[::1/"}, "its host or port is malformed"),
        ({"check_url": "http://me:pass@x/"}, "must not hold a user name or password"),
        ({"check_url": "http://@x/"}, "must not hold a user name or password"),
        ({"check_url": "http://x/#top"}, "must not have a fragment"),
        ({"check_url": "http://x/#"}, "must not have a fragment"),
        ({"check_url": "http://x/a b"}, "must be plain ASCII without spaces"),
        ({"check_url": "http://x/\r\nhost: y"}, "must be plain ASCII without spaces"),
        ({"check_url": "http://bücher.example/"}, "must be plain ASCII without spaces"),
        (
            {"check_url": "http://x/" + "a" * 2000},
            "`str` of length <= 2000",
        ),
        ({"secret_ref": "hunter2"}, "secret_ref must be env:NAME or file:/absolute/path"),
        ({"secret_ref": "env:"}, "secret_ref must be env:NAME"),
        ({"secret_ref": "file:/" + "x" * 4096}, "secret_ref has at most 4096 characters"),
        ({"secret_ref": "file:secret"}, "secret_ref must be env:NAME"),
        ({"secret_ref": "file:/a\0b"}, "secret_ref must be env:NAME"),
        ({"check_after_s": -1}, "check_after_s: expected `float` >= 0"),
        (
            {"check_after_s": True},
            "check_after_s: expected `float | null`, got `bool`",
        ),
        ({"check_interval_s": 0}, "check_interval_s: expected `float` >= 0.1"),
        ({"check_interval_s": 10**400}, "check_interval_s: number out of range"),
        ({"attempts_max": 0}, "attempts_max: expected `int` >= 1"),
        ({"attempts_max": 1.5}, "attempts_max: expected `int | null`, got `float`"),
        ({"timeout_s": "5"}, "timeout_s: expected `float | null`, got `str`"),
        ({"timeout_s": 61}, "timeout_s: expected `float` <= 60"),
        ({"parallel": 65}, "parallel: expected `int` <= 64"),
        (
            {"answer_bytes_max": 10**9},
            "answer_bytes_max: expected `int` <= 16777216",
        ),
    ],
)
def test_invalid_policy_is_refused(obj: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError) as caught:
        decode(obj)
    assert sentence in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_nan_is_out_of_bounds() -> None:
    with pytest.raises(PolicyError, match="check_after_s: expected"):
        GroupPolicy(check_after_s=float("nan")).validate()


@pytest.mark.parametrize("name", ["", "a" * 250, "a\nb", "a\0"])
def test_invalid_group_names_are_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="a group's name"):
        check_group_name(name)


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        (b"{", "is not JSON"),
        (b"[]", "has no version"),
        (b"{}", "has no version"),
        (b'{"v": "1"}', "has no version"),
        (b'{"v": 2, "magic": true}', "is of version 2; this build knows 1"),
        (b'{"v": 1, "check_url": "ftp://x"}', "must begin with http"),
    ],
)
def test_malformed_stored_policies_are_refused(stored: bytes, sentence: str) -> None:
    with pytest.raises(PolicyError) as caught:
        decode_policy(stored)
    assert sentence in str(caught.value)


async def test_groups_follow_the_store() -> None:
    store = FakeStore(old=encode_policy(GroupPolicy(parallel=2)), newer=b'{"v": 9}')
    groups = Groups(store)
    changed: list[str] = []
    groups.on_change(changed.append)
    await groups.load()
    assert groups.list() == [("old", GroupPolicy(parallel=2))]
    assert groups.policies.get("newer") is None
    assert groups.problem("newer") == "the stored policy is of version 9; this build knows 1"
    assert groups.problem("old") is None

    await groups.put("orders", GroupPolicy(timeout_s=2.0))
    assert groups.policies.get("orders") == GroupPolicy(timeout_s=2.0)
    assert [group for group, _ in groups.list()] == ["old", "orders"]

    assert await groups.remove("orders")
    assert await groups.remove("newer")
    assert not await groups.remove("missing")
    assert groups.policies.get("orders") is None
    assert groups.problem("newer") is None
    assert changed == ["old", "newer", "orders", "orders", "newer"]
    assert set(store.stored) == {"old"}


async def test_invalid_policy_is_not_stored() -> None:
    store = FakeStore()
    groups = Groups(store)
    await groups.load()
    with pytest.raises(PolicyError):
        await groups.put("orders", GroupPolicy(check_url="x"))
    with pytest.raises(PolicyError):
        await groups.put("", GroupPolicy())
    assert store.stored == {}
