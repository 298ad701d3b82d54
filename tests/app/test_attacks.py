"""Attacks by a program of its own making, on servers of these tests alone: bounded and seeded.

``AMPSCOPE_ATTACKS=10000 pytest -m thorough FILE -k made_up`` sends that many addresses, and as many
sets of widget values, shared among all pages; docs/security.md has the figures of such a run.

Origins and hosts, query strings, widget states by the protocol, names of runs over all pages in
Chromium. What each found before is closed by its own test elsewhere; these look for kin.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from google.protobuf.message import Message
from playwright.sync_api import Page
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.asyncio.client import ClientConnection

from ampscope.store.reader import Reader
from app.links import ENTRIES
from tests.helpers import browser, stores
from tests.helpers.dashboard_server import PLAIN, Running, ask, in_a_loop, opens, running, stream
from tests.helpers.hostile_runs import hostile_diagnosis, hostile_training
from tests.helpers.hostile_texts import HOSTILE

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1500)]
PAGES = [entry.name for entry in ENTRIES]
ASKED = -(-int(os.environ.get("AMPSCOPE_ATTACKS", "0")) // len(PAGES))  # per page; 0: the default
NUMBERS = ("0", "-1", "1e999", "nan", "9" * 30, str(2**63 - 1), str(2**53), "0x10", "١", "1.5", " ")
NAMES = ("run", "step", "module", "role", "again", "group", "demo", "bench", "compare", "mistake13",
         "type", "number1", "guess1", "guess9", "op", "list", "policy", "scale", "rank", "whatif",
         "series", "from", "to", "format", "view", "q", "__proto__", "")  # fmt: skip
BROKEN = ("could not be drawn", "Traceback", "exception {")
KINDS = ("bool_value", "double_value", "int_value", "string_value", "json_value", "bytes_value",
         "double_array_value", "int_array_value", "string_array_value", "trigger_value",
         "string_trigger_value", "file_uploader_state_value", "arrow_value",
         "chat_input_value")  # fmt: skip


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("attacked")
    stores.finished(folder / "runs.db", stores.SPEC)
    with running(folder, PLAIN) as found:
        yield found


def run_of(server: Running) -> str:
    with Reader(server.log.parent / "runs.db") as reader:
        return reader.runs()[0].id


async def sent(opened: ClientConnection, message: BackMsg) -> tuple[str, list[Message]]:
    """What comes back to the end of the script, as text, and its elements."""
    await opened.send(message.SerializeToString())
    texts: list[str] = []
    elements: list[Message] = []
    while True:
        data = await asyncio.wait_for(opened.recv(), 60)
        assert isinstance(data, bytes)
        got = ForwardMsg.FromString(data)
        if got.WhichOneof("type") == "script_finished":
            if got.script_finished == ForwardMsg.ScriptFinishedStatus.FINISHED_EARLY_FOR_RERUN:
                continue
            return "\n".join(texts), elements
        if len(data) < 200_000:
            texts.append(str(got))
        if got.WhichOneof("type") == "delta" and got.delta.WhichOneof("type") == "new_element":
            element = got.delta.new_element
            elements.append(getattr(element, str(element.WhichOneof("type"))))


def asked(page: str, query: str = "", states: list[WidgetState] | None = None) -> BackMsg:
    message = BackMsg()
    message.rerun_script.page_name = "" if page == "home" else page
    message.rerun_script.query_string = query
    message.rerun_script.widget_states.widgets.extend(states or [])
    return message


def test_hosts_and_origins_made_up(attacked: Running) -> None:
    """400 requests: none but those of loopback's names is served."""
    chance = random.Random(1)
    port = attacked.port
    parts = [
        "localhost", "127.0.0.1", "evil", "[::1]", ".", ":", "@", "/", "#", "?", "%00", "\\",
        str(port), "http", "//", "xn--", "é", " ", "\t", "localhost.", "0", "2130706433",
    ]  # fmt: skip
    for _ in range(200):
        made = "".join(chance.choices(parts, k=chance.randint(1, 4)))
        host = made.strip()
        if ask(port, "/", Host=made)[0] == 200:
            assert _is_loopback(host), made
        own = f"http://127.0.0.1:{port}"
        if ask(port, "/", Origin=f"http://{made}")[0] == 200:
            assert f"http://{host}".lower().rstrip("/") == own, made


def _is_loopback(host: str) -> bool:
    """As a browser reads it: a name, and a port if any."""
    found = re.fullmatch(r"(localhost|\[::1\]|127\.\d+\.\d+\.\d+)\.?(:\d{1,5})?", host.lower())
    return found is not None


@pytest.mark.parametrize("page", PAGES)
def test_query_strings_made_up(attacked: Running, page: str) -> None:
    """30 addresses per page: no error, and nothing is started."""
    chance = random.Random(page)
    run = run_of(attacked)

    async def attack() -> None:
        async with stream(attacked.port) as opened:
            for _ in range(ASKED or 30):
                noise = "".join(chance.choices(string.printable, k=9))
                values = (*HOSTILE[:13], *NUMBERS, run, run[:5], noise)
                query = {chance.choice(NAMES): chance.choice(values)[:500] for _ in range(4)}
                text = urlencode(query) if chance.random() < 0.8 else quote(str(query))
                said, _ = await sent(opened, asked(page, text))
                assert not any(word in said for word in BROKEN), (text, said[-3000:])

    in_a_loop(attack())
    with Reader(attacked.log.parent / "runs.db") as reader:
        assert len(reader.runs()) == 1


def value(kind: str, chance: random.Random) -> WidgetState:
    state = WidgetState()
    number = chance.choice([0, -1, 7, 2**63 - 1, -(2**63)])
    real = chance.choice([0.0, -1.5, 1e308, float("nan"), float("inf")])
    text = chance.choice([*HOSTILE[:13], *NUMBERS, ""])
    if kind == "bool_value" or kind == "trigger_value":
        setattr(state, kind, chance.random() < 0.5)
    elif kind == "double_value":
        state.double_value = real
    elif kind == "int_value":
        state.int_value = number
    elif kind in ("string_value", "json_value"):
        setattr(state, kind, text)
    elif kind == "bytes_value":
        state.bytes_value = text.encode()
    elif kind == "string_trigger_value":
        state.string_trigger_value.data = text
    elif kind == "double_array_value":
        state.double_array_value.data.extend([real] * chance.randint(0, 3))
    elif kind == "int_array_value":
        state.int_array_value.data.extend([number] * chance.randint(0, 3))
    elif kind == "string_array_value":
        state.string_array_value.data.extend([text] * chance.randint(0, 3))
    elif kind == "file_uploader_state_value":
        state.file_uploader_state_value.SetInParent()
    elif kind == "arrow_value":
        state.arrow_value.SetInParent()
    else:
        state.chat_input_value.SetInParent()
    return state


@pytest.mark.parametrize("page", PAGES)
def test_widget_states_made_up(attacked: Running, page: str) -> None:
    """20 sets of values of any type for a page's widgets; the buttons are left alone."""
    chance = random.Random(page)
    run = run_of(attacked)

    async def attack() -> list[str]:
        failed = []
        async with stream(attacked.port) as opened:
            query = urlencode({"run": run, "guess1": "a"})
            _, elements = await sent(opened, asked(page, query))
            ids = [e.id for e in elements if getattr(e, "id", "") and e.DESCRIPTOR.name != "Button"]
            for _ in range((ASKED or 20) if ids else 0):
                states = []
                for id_ in chance.sample(ids, min(len(ids), 3)):
                    state = value(chance.choice(KINDS), chance)
                    state.id = id_
                    states.append(state)
                said, _ = await sent(opened, asked(page, query, states))
                if any(word in said for word in BROKEN):
                    failed.append(str(states))
        return failed

    failed = in_a_loop(attack())
    assert not failed, (len(failed), failed[0], attacked.log.read_text()[-3000:])
    with Reader(attacked.log.parent / "runs.db") as reader:
        assert len(reader.runs()) == 1


@pytest.mark.browser
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_over_all_pages(tmp_path: Path, browser_page: Page, text: str) -> None:
    """Nothing of a run is a link, a picture or a script, and nothing is fetched from elsewhere."""
    store = tmp_path / "runs.db"
    runs = [hostile_diagnosis(store, text), hostile_training(store, text)]
    page, outside = browser_page, []
    with running(tmp_path, PLAIN) as found:
        page.on("request", lambda r: outside.append(r.url) if "evil" in r.url else None)
        page.on("dialog", lambda d: outside.append(d.message))
        for name in ("", "training", "gradients", "layers", "diagnosis", "telemetry", "loss_scale"):
            for run in runs:
                page.goto(f"{found.url}/{name}?run={run}")
                browser.settle(page)
                links = page.eval_on_selector_all(
                    "[data-testid=stMain] a[href], img[src]", "all => all.map(e => e.href || e.src)"
                )
                assert not [link for link in links if re.search("evil|^javascript", link)]
                assert page.evaluate("window.hacked") is None
                assert page.get_by_text("could not be drawn").count() == 0
    assert not outside


def test_sessions_that_come_and_go_are_not_kept(attacked: Running) -> None:
    """300 sessions one after another, each with a drawn page."""
    for _ in range(20):
        assert opens(attacked.port)
    before = attacked.rss

    async def churn() -> None:
        for _ in range(300):
            async with stream(attacked.port) as opened:
                await opened.send(asked("home").SerializeToString())

    in_a_loop(churn())
    assert ask(attacked.port, "/_stcore/health")[0] == 200
    assert attacked.rss - before < 300
