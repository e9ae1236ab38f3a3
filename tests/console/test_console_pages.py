"""What the console shows, read without scripts."""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.console.console_world import Reader, parked, pending, reader_of
from tests.kit.cluster import Proxies
from tests.kit.service import Service
from tests.kit.until import unique, until
from txbroker import __version__
from txbroker.contract.service import PrepareRequest
from txbroker.core.records import Decision, Message
from txbroker.core.routing import parse_id
from txbroker.proxy.console import search
from txbroker.proxy.partition import scan

HOSTILE = """"><script>alert('x')</script><b a='"""


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


# --- overview --------------------------------------------------------------------------------


async def test_overview_without_problems(service: Service, reader: Reader) -> None:
    seen = await reader.open("/")
    assert seen.status == 200
    assert seen.main.one("h1").text == "No problems"
    assert seen.main.all(**{"class": "concern is-bad"}) == []
    assert service.proxy.url in seen.text


async def test_parked_are_shown_first_with_next_step(service: Service, reader: Reader) -> None:
    group, ids = await parked(service, 2)
    seen = await reader.open("/")
    assert "needs action" in seen.main.one("h1").text
    (concern,) = seen.main.all("li", **{"class": "concern is-bad"})
    assert "2 parked transactions need a manual decision" in concern.text
    assert f"Group {group}." in concern.text
    assert "What to do:" in concern.text
    listed = await reader.open(concern.all("a")[0].attributes["href"])
    assert sorted(listed.listed()) == sorted(ids)


async def test_unreachable_group_is_shown_with_reason(service: Service, reader: Reader) -> None:
    group = await service.group(503)
    await pending(service, group=group)
    seen = await reader.until("/", f"Group {group} is unreachable")
    (concern,) = seen.main.all("li", **{"class": "concern is-warn"})
    assert "503" in concern.text
    assert "no attempt is used up" in concern.text


async def test_refused_are_shown_with_their_topic(service: Service, reader: Reader) -> None:
    topic = await service.topic()
    id = await service.prepare(Message(topic, b"k", b"v"))
    await service.world.delete_topic(topic)
    await service.act(id, "commit")
    await service.reaches(id, "refused")
    seen = await reader.open("/")
    assert "1 committed transaction is refused by a target" in seen.text
    assert f"Topic {topic}." in seen.text
    shown = await reader.open(f"/transactions/{id}")
    assert "Cause:" in shown.text
    assert shown.links("Revive…")
    assert not shown.links("Commit…")


async def test_silent_proxy_is_shown(proxies: Proxies, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = await proxies.add("one", "two")

    async def refuse() -> None:
        raise ConnectionResetError

    monkeypatch.setattr(other.proxy.broker, "overview", refuse)
    async with reader_of(one.proxy.url) as reader:
        seen = await reader.open("/")
    assert f"The proxy at {other.proxy.url} does not answer" in seen.text
    assert "unreachable" in seen.text
    assert "lower bounds" in seen.text


async def test_failing_checks_are_shown_with_the_last_answer(
    service: Service, reader: Reader
) -> None:
    group = await service.group(500)
    await pending(service, group=group)
    await service.asked_times(group, 3)
    await reader.until("/", f"Checks of group {group} bring no decision")
    endpoint = f"{service.desk.url}/check/{group}"
    for path in ("/", "/groups", f"/group?name={quote(group)}"):
        seen = await reader.open(path)
        assert "checks fail" in seen.text, path
        assert endpoint in seen.text, path
        assert "answered 500: out of order" in seen.text, path
        assert "no instance or check URL" not in seen.text, path
    (found,) = (await service.get("/v1/overview"))["groups"]
    assert found["check_url"] is True
    assert found["checks"]["counts"]["unclear"] >= 3
    assert found["checks"]["undecided"]["answer"] == "answered 500: out of order"
    # Producers can register any URL, so they must not read what it serves.
    (listed,) = await service.listed(group=group)
    assert "out of order" not in str([listed, await service.show(listed["id"])])


async def test_group_with_a_check_url_can_be_asked(service: Service, reader: Reader) -> None:
    group = await service.group({"decision": "unknown"}, check_after_s=3600)
    await pending(service, group=group)
    seen = await reader.open("/")
    assert "check URL" in seen.main.one("section", id="groups-first").text
    assert "no instance" not in seen.text


async def test_parked_show_why(service: Service, reader: Reader) -> None:
    group, _ = await parked(service, answer=500)
    assert f"The last answer of {group}: answered 500" in (await reader.open("/")).text
    listed = await reader.open("/transactions?state=parked")
    assert listed.main.one("tbody").one("td", **{"class": "why"}).text == "answered 500"
    seen = await reader.open(f"/group?name={quote(group)}")
    assert seen.main.one("section", id="parked-by").one("tbody").text == "answered 500 1"
    assert seen.links("Revive…")
    assert seen.links("Roll back parked…")


async def test_numbers_have_their_time_while_kafka_is_silent(
    service: Service, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pending(service, 3)
    monkeypatch.setattr("txbroker.proxy.partition.clock.KAFKA_SILENT_S", 0.0)
    service.world.kafka.go_down()

    async def both() -> bool:
        parts = (await service.get("/v1/overview"))["partitions"]
        return all(part["as_of_ms"] for part in parts)

    await until(both)
    seen = await reader.open("/")
    assert seen.main.one("h1").text.startswith("Kafka has not answered this proxy since 20")
    tile = plain(seen.main.one("section", id="sums").all("div")[0].text)
    assert re.match(r"Pending 3 oldest (< 1|\d+) s as of 20", tile)
    rates = seen.main.one("section", id="sums").one("div", **{"class": "rates"})
    assert [b.text for b in rates.all("b")] == ["–"] * 3
    assert "as of 20" in seen.main.one("section", id="groups-first").text
    text = seen.main.one("section", id="partitions").text
    assert text.count("as of 20") == 2
    assert text.endswith("–")
    found = await service.get("/v1/overview")
    assert found["complete"] is False
    assert sum(part["pending"] for part in found["partitions"]) == 3
    service.world.kafka.come_up()

    async def current() -> bool:
        return bool((await service.get("/v1/overview"))["complete"])

    await until(current)


# --- the last hour, a group, operators' actions ------------------------------------------------


async def test_overview_shows_the_last_hour(service: Service, reader: Reader) -> None:
    await pending(service, 3)
    seen = await reader.until("/", "pending: now 3, at most 3")
    charts = seen.main.one("section", id="past").all("figure")
    titles = [chart.one("strong").text for chart in charts]
    assert titles[:4] == [
        "Transactions a second", "Pending and parked", "Oldest pending", "Checks a second"
    ]  # fmt: skip
    for chart in charts:
        svg = chart.all("svg", role="img")[0]
        ids = {element.attributes["id"] for element in svg.all() if "id" in element.attributes}
        assert {svg.attributes["aria-labelledby"], svg.attributes["aria-describedby"]} == ids
    assert seen.main.all("path", **{"class": "event is-start"})
    events = seen.main.one("ol", **{"class": "events"}).text
    assert "Proxy started" in events
    assert "Took over half partitions 0, 1" in events
    assert seen.links("1h") == ["/?span=1h"]
    assert "The last hour" in (await reader.open("/?span=1h")).text


async def test_group_page_shows_checks_instances_and_policy(
    service: Service, reader: Reader
) -> None:
    group = await service.group({"decision": "rollback"}, check_after_s=0, attempts_max=7)
    (id,) = await pending(service, group=group)
    await service.reaches(id, "rolled_back")
    path = f"/group?name={quote(group)}"
    seen = await reader.open(path)
    row = seen.main.one("section", id="last-checks").one("tbody").text
    assert f"rollback rollback {service.desk.url}/check/{group} {id}" in row
    assert "Attempts 7" in seen.main.one("section", id="policy").text
    assert "checks go to the check URL" in seen.main.one("section", id="instances").text
    async with service.producer(group, instance="till-7", check=lambda _: Decision.UNKNOWN):
        instances = (await reader.until(path, "till-7")).main.one("section", id="instances").text
    assert f"till-7 yes 127.0.0.1 txbroker/{__version__}" in instances
    assert instances.endswith(service.proxy.url)
    assert (await reader.open("/group?name=")).status == 400
    unknown = await reader.open("/group?name=unknown")
    assert (unknown.status, "No proxy knows this group" in unknown.text) == (200, True)


async def test_group_page_joins_all_proxies(proxies: Proxies) -> None:
    one, other = await proxies.add("one", "two")
    topic, group = await one.topic(), unique("group")
    async with (
        one.producer(group, instance="a", check=lambda _: Decision.COMMIT),
        other.producer(group, instance="b", check=lambda _: Decision.COMMIT),
    ):
        for number in range(8):
            message = Message(topic, b"k%d" % number, b"v")
            await one.prepare(message, group=group, order_key=str(number))

        async def known() -> bool:
            path = f"/v1/history?group={group}&since_s=60"
            found = [await service.get(path) for service in (one, other)]
            return all(
                sum(point["prepared"] for point in history["points"]) == 8
                and {i["name"] for i in history["instances"]} == {"a", "b"}
                and history["complete"]
                for history in found
            )

        await until(known)
    async with reader_of(other.proxy.url) as reader:
        seen = await reader.open("/")
    starts = [li.text for li in seen.main.all("li", **{"class": "is-start"})]
    assert len(starts) == 2
    assert {one.proxy.url, other.proxy.url} == {text.rpartition(" ")[2] for text in starts}


async def test_operators_actions_are_shown_after_a_restart(
    service: Service, reader: Reader
) -> None:
    group, ids = await parked(service, 4)
    assert "No operator has acted" in (await reader.open("/audit")).text
    for id in ids[:3]:
        await service.act(id, "rollback", reason="cancelled", by="Ada")
    await service.act(ids[3], "revive", reason="mended", by="Grace")
    path = "/v1/history?actions=true"
    before = (await service.get(path))["actions"]
    assert [(a["action"], a["by"].split()[0], a["reason"], a["count"]) for a in before] == [
        ("revive", "Grace", "mended", 1),
        ("rollback", "Ada", "cancelled", 3),
    ]
    assert (await service.get("/v1/history"))["actions"] == []
    await service.restart()
    assert (await service.get(path))["actions"] == before
    async with reader_of(service.proxy.url) as again:
        seen = await again.open("/audit")
    first, second = [row.text for row in seen.main.one("tbody").all("tr")]
    assert "Grace" in first
    assert f"Revived {ids[3]} mended {group}" in first
    assert f"Rolled back {before[1]['id']} and 2 others cancelled {group}" in second


async def test_overview_of_100_000_pending_is_quick(service: Service, reader: Reader) -> None:
    message = Message(await service.topic(), b"k", b"v")
    groups = [f"group-{number}" for number in range(200)]
    for start in range(0, 100_000, 2000):
        for group in groups[start // 2000 :: 50]:
            requests = [PrepareRequest(group, (message,), check_after_s=3600)] * 500
            for run in service.proxy.cluster.runs(requests):
                await run.answers
    took_s = []
    for _ in range(7):
        began_s = time.perf_counter()
        seen = await reader.open("/")
        took_s.append(time.perf_counter() - began_s)
    assert "100 000" in seen.main.one("section", id="sums").text.replace("\u202f", " ")
    # 6 ms with a quiet processor; here the client and its parser are in the same process.
    assert min(took_s) < 0.1, took_s


# --- lists -----------------------------------------------------------------------------------


async def test_list_is_paged(service: Service, reader: Reader) -> None:
    group = unique("group")
    ids = await pending(service, 55, group=group)
    seen = await reader.open(f"/transactions?group={group}&state=&topic=&older=")
    assert len(seen.listed()) == 50
    assert not seen.links("First page")
    rest = await reader.open(seen.link("Next page"))
    assert not rest.links("Next page")
    # Of those that were prepared in the same millisecond the order is that of their ids.
    assert sorted(seen.listed() + rest.listed()) == sorted(ids)
    times = [(await service.show(id))["prepared_at_ms"] for id in seen.listed() + rest.listed()]
    assert times == sorted(times)
    assert (await reader.open(rest.link("First page"))).listed() == seen.listed()


async def test_a_list_is_filtered(service: Service, reader: Reader) -> None:
    topic, other, group = await service.topic(), await service.topic(), unique("group")
    mine = await service.prepare(Message(topic, b"k", b"v"), group=group)
    elsewhere = await service.prepare(Message(other, b"k", b"v"), group=group)
    gone = await service.prepare(Message(topic, b"k", b"v"), group=group)
    await service.act(gone, "rollback")

    async def listed(query: str) -> list[str]:
        return (await reader.open(f"/transactions?group={group}&{query}")).listed()

    assert sorted(await listed("")) == sorted([mine, elsewhere])
    assert await listed(f"topic={other}") == [elsewhere]
    assert await listed("state=rolled_back") == [gone]
    assert await listed("state=parked") == []
    assert await listed("older=1d") == []
    seen = await reader.open(f"/transactions?group={group}&topic={topic}&state=pending&older=0s")
    assert seen.main.one("input", name="topic").attributes["value"] == topic
    chosen = [o for o in seen.main.one("select", name="state").all("option")
              if "selected" in o.attributes]  # fmt: skip
    assert [o.text for o in chosen] == ["pending"]


@pytest.mark.parametrize(
    "query", ["state=lost", "older=soon", "limit=0", "cursor=x", "group=%00", "older_than_s=600"]
)
async def test_invalid_filter_answers_with_a_page(reader: Reader, query: str) -> None:
    seen = await reader.open(f"/transactions?{query}")
    assert seen.status == 400
    assert seen.main.one("h1").text == "Not possible"
    assert seen.link("Overview") == "/"


# --- one transaction -------------------------------------------------------------------------


async def test_search_field_takes_id_record_and_key(service: Service, reader: Reader) -> None:
    topic, key = await service.topic(), unique("order")
    id = await service.prepare(Message(topic, key.encode(), b"v"))
    await service.commit(id)
    for text in (f" {id.lower()} ", f"{topic}/0@0"):
        seen = await reader.open(f"/find?find={quote(text)}")
        assert (seen.status, seen.url.path) == (200, f"/transactions/{id}")
    for text in (id[:22], key):
        seen = await reader.open(f"/find?find={quote(text)}")
        assert (seen.status, seen.url.path) == (200, "/find")
        assert seen.listed() == [id]
        assert "1 transaction found" in seen.text
    seen = await reader.open(f"/find?topic={topic}&newer=2h")
    assert seen.listed() == [id]
    assert "Nothing was found; everything is read" in (await reader.open("/find?key=none")).text
    unknown = "0" + id[1:-6] + "ZZZZZZ"
    assert (await reader.open(f"/transactions/{unknown}")).status == 404
    for wrong in ("find=t/0@99", f"find={topic}/0@99", "newer=soon", "header=x", "key=k&id=!!"):
        assert (await reader.open(f"/find?{wrong}")).status in (400, 404), wrong


@pytest.mark.parametrize("more", ["", "&newer=2h"])
async def test_search_goes_on_page_by_page(
    service: Service, reader: Reader, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setattr(scan, "BLOCK", 2)
    monkeypatch.setattr(search, "PAGE_ROWS", 2)
    topic, group = await service.topic(), unique("many")
    ids = [await service.prepare(Message(topic, b"k", b"v"), group=group) for _ in range(5)]
    for id in ids:
        await service.act(id, "rollback")
    seen, listed = await reader.open(f"/find?group={group}&topic={topic}{more}"), set()
    for _ in range(50):
        listed |= set(seen.listed())
        if not seen.links("Search on"):
            break
        assert "% of the topics" in seen.text
        seen = await reader.open(seen.link("Search on"))
    assert listed == set(ids)


async def test_what_memory_lost_is_shown_or_named(service: Service, reader: Reader) -> None:
    topic = await service.topic()
    id = await service.prepare(Message(topic, b"k", b"v"))
    await service.commit(id, reason="paid")
    for owner in service.proxy.broker.partitions.open().values():
        owner.ledger.index.settled.seal()
        owner.ledger.index.settled.shown.clear()
    listed = await reader.open("/transactions?state=promoted")
    shown = await reader.open(f"/transactions/{id}")
    traced = await reader.open(shown.link("Read the places of all records"))
    for seen in (listed, shown, traced):
        assert "None" not in seen.text
    assert "commit by operator" in shown.text
    assert "paid" in shown.text
    assert f"{topic}/0@0" in shown.text
    assert "Read back" in shown.text
    assert f".op/{parse_id(id).partition}@" in traced.text
    await service.delete_topic(topic)
    gone = await reader.open(f"/transactions/{id}")
    assert "Unknown" in gone.text
    assert "does not exist" in gone.text


async def test_timeline_shows_each_event(service: Service, reader: Reader) -> None:
    topic = await service.topic()
    group = await service.group({"decision": "commit"})
    id = await service.prepare(Message(topic, b"k", b"v"), group=group)
    await service.reaches(id, "promoted")
    seen = await reader.open(f"/transactions/{id}")
    lines = [li.one("strong").text for li in seen.main.one("section", id="timeline").all("li")]
    assert lines == ["prepared", "check", "commit", "promoted"]
    text = seen.main.one("section", id="timeline").text
    assert f"{service.desk.url}/check/{group}" in text
    assert "attempt 1.1 (due)" in text
    assert f"to {topic}/0@0" in text
    assert seen.main.all("a", **{"class": "button"}) == []  # nothing is left to be done


async def test_content_is_hidden_until_requested(service: Service, reader: Reader) -> None:
    topic = await service.topic()
    headers = (("trace", b"secret-header"), ("none", None))
    message = Message(topic, b"\xff\x00", HOSTILE.encode(), headers)
    id = await service.prepare(message, Message(topic, b"k", None))
    seen = await reader.open(f"/transactions/{id}")
    for secret in ("alert", "secret-header", "ff 00"):
        assert secret not in seen.html
    shown = await reader.open(seen.link("Show content").partition("#")[0])
    assert [pre.raw for pre in shown.main.all("pre")] == ["ff 00", HOSTILE, "secret-header", "k"]
    assert "<script>alert" not in shown.html
    assert "null" in shown.text
    assert shown.links("Hide content")


# --- groups ----------------------------------------------------------------------------------


async def test_groups_show_how_they_are_checked(service: Service, reader: Reader) -> None:
    registered, away, connected = await service.group(200), await service.group(503), unique("g")
    (id,) = await pending(service, group=away)
    async with (
        service.producer(connected, instance="till-7", check=lambda _: Decision.UNKNOWN),
        service.producer(connected, instance="web-1"),  # which cannot be asked
    ):

        async def rows() -> dict[str, str]:
            seen = await reader.open("/groups")
            table = seen.main.one("tbody").all("tr")
            return {row.one("th").text: row.text for row in table}

        async def all_shown() -> bool:
            found = await rows()
            return "not reached" in found.get(away, "") and "till-7" in found.get(connected, "")

        await until(all_shown)
        found = await rows()
        assert "check URL" in found[registered]
        assert "503" in found[away]
        assert "1 instance connected" in found[connected]
        narrowed = await reader.open(f"/groups?name={away.upper()}")
        assert [row.one("th").text for row in narrowed.main.one("tbody").all("tr")] == [away]
        checked = await reader.open(narrowed.link("Check now…"))
        assert checked.listed() == [id]
        waiting = await reader.open(f"/transactions/{id}")
        assert "No instance of its group has been reachable for" in waiting.text
        assert "503" in waiting.text
        assert (await service.show(id))["waiting"].partition(" for ")[0] in waiting.text


async def test_reachable_group_shows_no_waiting_note(service: Service, reader: Reader) -> None:
    group = await service.group({"decision": "unknown"}, check_after_s=0, check_interval_s=3600)
    (id,) = await pending(service, group=group)

    async def asked() -> bool:
        return (await service.show(id))["attempts"] == 1

    await until(asked)
    assert "can be asked" not in (await reader.open(f"/transactions/{id}")).text
    assert "waiting" not in await service.show(id)


async def test_token_in_a_check_url_is_hidden(service: Service, reader: Reader) -> None:
    group = unique("group")
    url = {"check_url": "https://orders.example/check?token=hunter2"}
    await service.call("PUT", f"/v1/groups/{group}", url)
    seen = await reader.open(f"/groups?name={group}")
    assert "https://orders.example/check?…" in seen.text
    assert "hunter2" not in seen.html


# --- hostile content, and rules of every page --------------------------------------------


async def test_undecided_answer_is_on_the_page_of_the_transaction(
    service: Service, reader: Reader
) -> None:
    group = await service.group(500, attempts_max=5, check_interval_s=60)
    (id,) = await pending(service, group=group)
    texts = ("without a decision", f"/check/{group}", "answered 500")
    await reader.until(f"/transactions/{id}", *texts)


async def test_hostile_names_are_escaped(service: Service, reader: Reader) -> None:
    topic = await service.topic()
    group = f"{HOSTILE}{unique('g')}"
    message = Message(topic, b"k", b"v", ((HOSTILE, b"v"),))
    id = await service.prepare(message, group=group, order_key=HOSTILE)
    await service.act(id, "rollback", reason=HOSTILE, by=HOSTILE)
    await service.prepare(message, group=group)
    paths = [
        "/",
        "/groups",
        f"/group?name={quote(group)}",
        "/audit",
        f"/transactions?group={quote(group)}",
        f"/transactions/{id}?bodies=1",
        f"/actions/commit?group={quote(group)}",
        f"/find?find={quote(HOSTILE)}",
        f"/find?key={quote(HOSTILE)}",
        f"/find?header=a={quote(HOSTILE)}&id=00",
        f"/groups?name={quote(HOSTILE)}",
        f"/transactions/{quote(HOSTILE, safe='')}",
        f"/actions/{quote(HOSTILE, safe='')}",
    ]
    for path in paths:
        seen = await reader.open(path)
        assert "<script>alert" not in seen.html, path
        scripts = [script.attributes for script in seen.root.all("script")]
        assert all(urlsplit(s["src"]).path.startswith("/static/") for s in scripts), path
        assert len(scripts) == 1, path
    listed = await reader.open(f"/transactions?group={quote(group)}")
    assert group in [bdi.raw for bdi in listed.main.all("bdi")]
    text = await reader.open(f"/transactions/{id}")
    assert HOSTILE in [bdi.raw for bdi in text.main.all("bdi")]


async def every_page(service: Service, reader: Reader) -> list[tuple[str, Any]]:
    group, (id,) = await parked(service)
    paths = [
        "/", "/transactions", "/transactions?state=parked", f"/transactions/{id}",
        f"/transactions/{id}?bodies=1", "/groups", f"/group?name={group}",
        "/group?name=unknown", "/audit", "/find", "/find?key=k",
        f"/actions/commit?id={id}",
        f"/actions/revive?group={group}", "/transactions/nonsense",
    ]  # fmt: skip
    return [(path, await reader.open(path)) for path in paths]


async def test_every_page_has_security_headers(service: Service, reader: Reader) -> None:
    for path, seen in await every_page(service, reader):
        policy = seen.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self';"), path
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert seen.headers["X-Content-Type-Options"] == "nosniff"
        assert seen.headers["Cache-Control"] == "no-store"
        assert seen.headers["Referrer-Policy"] == "same-origin"
        for element in seen.root.all():
            assert "style" not in element.attributes, path
            assert not [name for name in element.attributes if name.startswith("on")], path
            for name in ("href", "src", "action"):
                there = urlsplit(element.attributes.get(name, ""))
                assert not there.scheme, path
                assert not there.netloc, path


async def test_every_page_is_accessible(service: Service, reader: Reader) -> None:
    for path, seen in await every_page(service, reader):
        root = seen.root
        assert root.one("html").attributes["lang"] == "en"
        assert len(root.all("h1")) == 1, path
        ids = [e.attributes["id"] for e in root.all() if "id" in e.attributes]
        assert len(ids) == len(set(ids)), path
        labelled = {label.attributes["for"] for label in root.all("label")}
        for field in [*root.all("input"), *root.all("select")]:
            hidden = field.attributes.get("type") == "hidden"
            assert hidden or field.attributes["id"] in labelled, path
        for element in root.all():
            for name in ("aria-labelledby", "aria-describedby"):
                assert element.attributes.get(name, ids[0]) in ids, path
            if element.tag in ("section", "nav", "table"):
                continue
            if element.tag in ("a", "button") and not element.attributes.get("hidden"):
                assert element.text or element.all("img"), path
        for table in root.all("table"):
            assert all(th.attributes["scope"] in ("row", "col") for th in table.all("th")), path


async def test_files_are_cached_under_their_hash(reader: Reader) -> None:
    seen = await reader.open("/")
    (sheet,) = [e.attributes["href"] for e in seen.root.all("link", rel="stylesheet")]
    file = await reader.open(sheet)
    assert (file.status, file.headers["Content-Type"]) == (200, "text/css; charset=utf-8")
    assert file.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    # A page of another build asks for another content: it gets this one, and keeps it not.
    other = await reader.open(sheet.replace(sheet.split("/")[2], "0" * 16))
    assert (other.status, other.headers["Cache-Control"]) == (200, "no-cache")
    assert (await reader.open("/static/x/../../etc/passwd")).status == 404
    assert (await reader.open("/static/x/console.html")).status == 404


async def test_unknown_host_name_gets_no_page(reader: Reader) -> None:
    seen = await reader.open("/", Host="rebound.example")
    assert seen.status == 403
    assert "rebound.example" in seen.text


async def test_head_request_has_no_content(reader: Reader) -> None:
    async with reader.http.head("/transactions") as answer:
        assert answer.status == 200
        assert await answer.read() == b""


async def test_missing_owner_answers_with_a_page(
    service: Service, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.proxy.broker._calls, "stopping", True)
    seen = await reader.open("/transactions")
    assert seen.status == 503
    assert seen.headers["Retry-After"] == "1"
    assert seen.main.one("h1").text == "Not possible now"
    assert seen.links("Retry")
    monkeypatch.undo()


async def test_internal_error_answers_with_a_page(
    service: Service, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise ZeroDivisionError("a secret of the inside")

    monkeypatch.setattr(service.proxy.cluster, "overview", broken)
    seen = await reader.open("/")
    assert seen.status == 500
    assert "see its log" in seen.text
    assert "secret" not in seen.html
