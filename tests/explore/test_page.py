"""`clipzoo explore`: the page, its server and its export."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from urllib.parse import quote

import pytest

from clipzoo.cli.models import _checkpoint_step
from clipzoo.errors import ConfigError
from clipzoo.explore import app
from clipzoo.explore.app import Explorer, escaped, names_of, thinned
from clipzoo.report.figures import Curve
from clipzoo.report.pages import explorer_page
from tests.support.explored import explorer_of
from tests.support.legible import faults

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Explorer:
    return explorer_of(tmp_path_factory.mktemp("site"), "clip", "wpse")


@pytest.fixture(scope="module")
def address(site):
    with serving(site) as (address, _):
        yield address


@contextmanager
def serving(site: Explorer) -> Iterator[tuple[tuple[str, int], set]]:
    """Serve a site in the block; yield the address and the open connections."""
    running = app.server(site)
    with app.listener(0) as listening:
        thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
        thread.start()
        yield listening.getsockname(), running.server_state.connections
        running.should_exit = True
        thread.join()


def get(address: tuple[str, int], path: str, host: str = "127.0.0.1:1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=200)
    connection.request("GET", path, headers={"Host": host})
    response = connection.getresponse()
    return response.status, response.read()


@pytest.mark.medium
def test_the_server_listens_on_this_machine_alone_and_answers_its_own_names_alone(address):
    assert address[0] == "127.0.0.1"
    assert get(address, "/", "localhost:9000")[0] == get(address, "/")[0] == 200
    assert get(address, "/", "attacker.example")[0] == get(address, "/api/overview", "attacker.example:80")[0] == 400


@pytest.mark.medium
def test_the_server_answers_what_the_page_asks(address, site):
    status, content = get(address, "/api/search?collection=0&caption=red%20thing")
    assert status == 200 and json.loads(content) == site.answer("search?collection=0&caption=red%20thing")
    assert get(address, "/picture?collection=1&row=2")[1].startswith(b"\xff\xd8\xff")
    assert get(address, "/../etc/passwd")[0] == 404


@pytest.mark.medium
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("search?collection=0&caption=%20", "type a caption first"),
        ("search?collection=9&caption=a", "collection must be a number from 0 to 1, not '9'"),
        ("picture?collection=0&row=-1", "row must be a number from 0 to 12, not '-1'"),
        ("picture?collection=0", "row must be a number from 0 to 12, not ''"),
        ("secrets?collection=0&row=0", "unknown request 'secrets'"),
    ],
)
def test_a_wrong_question_has_one_message(path, message, address):
    status, content = get(address, f"/api/{path}")
    assert status == 400 and json.loads(content) == {"error": message}


@pytest.mark.medium
def test_a_port_in_use_is_named(address):
    with pytest.raises(ConfigError, match="port .* cannot be used .*: give another --port"):
        app.listener(address[1])


@pytest.mark.medium
@pytest.mark.parametrize(
    "line",
    [
        f"GET /picture?collection=0&row={'9' * 5000} HTTP/1.1", "GET //[ HTTP/1.1", f"GET /{'a' * 100_000} HTTP/1.1",
        "GET /api/%ff?collection=%00 HTTP/1.1", "GET /api/search?collection=0&caption=%ff HTTP/1.1",
        "POST /api/overview HTTP/1.1", f"GET /api/search?{'&' * 5000} HTTP/1.1", "PRI * HTTP/2.0", "\0\1\2",
    ],
)  # fmt: skip
def test_a_broken_request_is_refused_and_the_next_one_answered(line, address, caplog):
    with socket.create_connection(address, timeout=200) as client:
        client.sendall(f"{line}\r\nHost: localhost\r\n\r\n".encode())
        answer = client.recv(1000)
    assert re.match(rb"HTTP/1.1 [24]\d\d ", answer), answer
    assert "Traceback" not in caplog.text and get(address, "/api/overview")[0] == 200


@pytest.mark.medium
def test_clients_that_send_half_a_request_or_stop_reading_block_nobody_and_are_cut_off(site, monkeypatch):
    monkeypatch.setattr(app, "CLIENT_TIMEOUT_SECONDS", 2)
    (first, *others) = site.collections
    # 20 MB: more than the buffers of a connection hold.
    large = Explorer(site.models, [replace(first, choices=["a" * 20_000] * 1000), *others])
    with serving(large) as (address, connections), ExitStack() as clients:
        half = []
        for _ in range(20):
            half.append(clients.enter_context(socket.create_connection(address, timeout=200)))
            half[-1].sendall(b"GET /api/overview HTT")
            stopped = clients.enter_context(socket.create_connection(address, timeout=200))
            stopped.sendall(b"GET /api/overview HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(5):
            assert get(address, "/api/search?collection=0&caption=red%20thing")[0] == 200
        assert {client.recv(1) for client in half} == {b""}
        wait_until(lambda: not connections)


@pytest.mark.slow
def test_two_hundred_clients_are_answered_for_a_minute_beside_fifty_that_stop_reading(site):
    async def ask(address: tuple[str, int], end: float) -> int:
        asked = 0
        while time.monotonic() < end:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /api/search?collection=0&caption=red%20thing HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"]"), answer[:200]
            writer.close()
            asked += 1
        return asked

    async def everyone(address: tuple[str, int]) -> list[int]:
        return await asyncio.gather(*(ask(address, time.monotonic() + 60) for _ in range(200)))

    with serving(site) as (address, _), ExitStack() as clients:
        for _ in range(50):
            client = clients.enter_context(socket.create_connection(address))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        counts = asyncio.run(everyone(address))
    print(f"{sum(counts)} requests, {min(counts)} to {max(counts)} for each client")
    assert min(counts) > 0


def test_the_page_loads_nothing_from_elsewhere_and_its_text_is_escaped():
    page = explorer_page({"answers": {"overview": {"collections": [{"choices": [HOSTILE]}]}}, "pictures": {}})
    assert HOSTILE not in page and page.count("</script>") == 2
    stored = re.search(r'<script type="application/json" id="answers">(.*?)</script>', page, re.S)
    assert stored and json.loads(stored[1])["answers"]["overview"]["collections"][0]["choices"] == [HOSTILE]
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in page
    addresses = set(re.findall(r"https?://[^\s\"'`]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, which nothing loads


@pytest.mark.medium
def test_an_export_has_an_answer_to_each_of_its_captions_and_all_pictures(site):
    page = site.static(captions=2)
    stored = re.search(r'<script type="application/json" id="answers">(.*?)</script>', page, re.S)
    assert stored
    content = json.loads(stored[1])
    for number, collection in enumerate(content["answers"]["overview"]["collections"]):
        assert len(collection["choices"]) == 2
        for caption in collection["choices"]:
            found = content["answers"][f"search?collection={number}&caption={escaped(caption)}"]
            for model in found:
                best = model["matches"][0]["row"]
                place = f"collection={number}&row={best}"
                assert content["pictures"][f"{number}/{best}"].startswith("data:image/jpeg;base64,")
                assert f"picture?{place}" in content["answers"]
                assert f"parts?{place}&caption={escaped(caption)}" in content["answers"]


def test_captions_are_escaped_in_an_export_as_a_browser_escapes_them():
    """encodeURIComponent leaves A-Z a-z 0-9 - _ . ! ~ * ' ( ) alone."""
    assert escaped("it's (a) *red* ~ naïve/?&=#%") == "it's%20(a)%20*red*%20~%20na%C3%AFve%2F%3F%26%3D%23%25"
    assert quote("é") == escaped("é")


def test_a_long_curve_keeps_its_last_value_and_no_value_that_json_cannot_write():
    values = tuple(float(step) for step in range(1001))
    curve = thinned(Curve("loss", "loss", "nats", values, (float("nan"), *values[1:])), main=True)
    assert len(curve["values"]) <= 400 and curve["values"][-1] == 1000.0
    assert json.loads(json.dumps(curve, allow_nan=False))["unit"] == "nats"


def test_runs_of_one_name_are_told_apart():
    assert names_of(["runs/a/clip", "runs/b/clip", "runs/kme/"]) == ["runs/a/clip", "runs/b/clip", "kme"]
    assert names_of(["runs/a", "runs/a"]) == ["runs/a (1)", "runs/a (2)"]


def test_a_run_without_a_checkpoint_is_told_when_to_explore_it(tmp_path):
    parts = "".join(f"{part}: {{_target_: x.Y}}\n" for part in ("encoder", "head", "objective", "data", "optim"))
    (tmp_path / "config.yaml").write_text(f"seed: 0\n{parts}trainer: {{_target_: x.Y, checkpoints: {{every: 200}}}}\n")
    with pytest.raises(ConfigError, match=r"has no checkpoint yet \(trainer.checkpoints.every=200\)"):
        _checkpoint_step(str(tmp_path))


@pytest.fixture(scope="module")
def browser():
    """The Chromium of this machine."""
    playwright, chromium = pytest.importorskip("playwright.sync_api"), shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page that fails the test for an error of its script, or for a request to another host."""
    page = browser.new_page(viewport={"width": 390, "height": 800})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: None if _is_own(request.url) else faults.append(request.url))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert faults == []


def _is_own(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "file:"))


def shown_rows(page, place: str) -> list[int]:
    return page.eval_on_selector_all(f"{place} button[data-row]", "all => all.map(one => Number(one.dataset.row))")


def wait_until(condition: Callable[[], bool], seconds: float = 200) -> None:
    """The page's policy forbids to evaluate a string, as a browser's own waiting does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_five_interactions_in_a_browser(address, site, page):
    page.goto(f"http://127.0.0.1:{address[1]}/")
    # A caption is typed: the pictures of both models, best first.
    page.fill("#caption", "blue thing")
    page.press("#caption", "Enter")
    expected = [match["row"] for answer in site.answer("search?collection=0&caption=blue%20thing")
                for match in answer["matches"]]  # fmt: skip
    wait_until(lambda: shown_rows(page, "#results") == expected)
    # A picture is pressed: its captions and neighbours.
    page.click("#results button[data-row='4'] >> nth=0")
    page.wait_for_selector("#picture li:has-text('thing number 4 seen')")
    neighbours = site.answer("picture?collection=0&row=4")["neighbours"]
    rows = [match["row"] for answer in neighbours for match in answer["matches"]]
    assert shown_rows(page, "#picture") == rows
    # A word is pressed: the patches show its parts.
    page.wait_for_selector(".parts .words button")
    before = page.eval_on_selector_all(".patches button", "all => all.map(one => one.title)")
    page.click(".parts .words button:has-text('blue')")
    after = page.eval_on_selector_all(".patches button", "all => all.map(one => one.title)")
    assert len(before) == len(after) > 3 and before != after
    # Another dataset is chosen: its map is coloured by class.
    page.select_option("#collection", label="colours")
    page.wait_for_selector("#classes .legend li:has-text('magenta')")
    fills = page.eval_on_selector_all(
        "svg.map circle.point", "all => new Set(all.map(one => one.getAttribute('fill'))).size"
    )
    assert fills == 7
    # A point of the map is pressed: its picture and class.
    page.click("svg.map circle.point[data-row='3'] >> nth=0", force=True)
    page.wait_for_selector("#picture >> text=class: yellow")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert faults(page) == []


@pytest.mark.slow
def test_hostile_text_is_shown_as_text(address, site, page, monkeypatch):
    monkeypatch.setitem(site.collections[0].captions, 2, [HOSTILE])
    page.goto(f"http://127.0.0.1:{address[1]}/")
    page.fill("#caption", HOSTILE)
    page.press("#caption", "Enter")
    page.wait_for_selector("#results img")
    page.click("svg.map circle.point[data-row='2'] >> nth=0", force=True)
    page.wait_for_selector("#picture li")
    assert page.inner_text("#picture .about li") == HOSTILE
    page.wait_for_selector("#parts h3")
    assert HOSTILE in page.inner_text("#parts h3")
    assert page.query_selector("img[src='x']") is None


@pytest.mark.slow
def test_an_export_answers_without_a_server(site, page, tmp_path):
    (tmp_path / "index.html").write_text(site.static(captions=3))
    page.goto((tmp_path / "index.html").as_uri())
    page.wait_for_selector("#results img")
    first = shown_rows(page, "#results")
    page.select_option("#caption", index=2)
    wait_until(lambda: shown_rows(page, "#results") not in ([], first))
    page.click("#results button[data-row] >> nth=0")
    page.wait_for_selector(".parts .words button")
    assert page.eval_on_selector_all("#results img", "all => all.every(one => one.naturalWidth > 0)")
    assert page.inner_text("#message") == ""
