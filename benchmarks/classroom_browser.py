"""A browser as Streamlit's server sees one: the websocket, BackMsg out, ForwardMsg in.

It remembers the widgets that it was sent and sends their states back with every rerun, follows the
clocks of fragments (``auto_rerun``), and draws nothing. What it costs is mostly decoding, so a
message that is too large to hold a widget or an ending is counted and not decoded.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import urlencode

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.asyncio.client import ClientConnection, connect

SMALL = 16_384  # bytes: charts and tables are larger, widgets and endings much smaller
TIMEOUT_S = 60.0
ALERT_ERROR = 1  # streamlit/proto/Alert.proto
GOOD_ENDS = ("FINISHED_SUCCESSFULLY", "FINISHED_FRAGMENT_RUN_SUCCESSFULLY")


@dataclass(slots=True)
class Widget:
    """What a page offers and what it stands at."""

    kind: str  # slider | radio | buttons | checkbox | select
    options: tuple[str, ...]
    state: WidgetState
    fragment: str  # a widget in a fragment runs that alone


@dataclass(slots=True)
class Tab:
    """One session. ``errors`` are sentences: exceptions, red boxes, runs that did not end well."""

    stream: ClientConnection
    pages: dict[str, str] = field(default_factory=dict)  # address -> hash
    widgets: dict[str, Widget] = field(default_factory=dict)
    clocks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    received: int = 0  # bytes
    page: str = ""
    query: str = ""
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self, page: str, **query: str) -> float:
        """Walk to a page; seconds until its script has finished."""
        self.page, self.query = page, urlencode(query)
        self.widgets.clear()
        self._stop_clocks()
        return await self._rerun()

    async def set(self, widget: str, value: str) -> float:
        """Move a slider, choose an option; seconds until the page shows what follows."""
        state = self.widgets[widget].state
        if self.widgets[widget].kind == "radio":
            state.string_value = value
        else:
            state.string_array_value.data[:] = [value]
        return await self._rerun(self.widgets[widget].fragment, is_auto=False)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is on its way."""
        return self._sending.locked()

    async def close(self) -> None:
        self._stop_clocks()
        await self.stream.close()

    async def _rerun(self, fragment: str = "", *, is_auto: bool = True) -> float:
        async with self._sending:
            message = BackMsg()
            client = message.rerun_script
            client.query_string = self.query
            client.page_script_hash = self.pages.get(self.page, "")
            client.page_name = "" if client.page_script_hash else self.page
            client.fragment_id = fragment
            client.is_auto_rerun = bool(fragment) and is_auto
            client.widget_states.widgets.extend(w.state for w in self.widgets.values())
            started = time.perf_counter()
            await self.stream.send(message.SerializeToString())
            async with asyncio.timeout(TIMEOUT_S):
                while not await self._read():
                    pass
            return time.perf_counter() - started

    async def _read(self) -> bool:
        """One message; True when it ends the run."""
        data = await self.stream.recv()
        assert isinstance(data, bytes)
        self.received += len(data)
        if len(data) > SMALL:
            return False
        message = ForwardMsg.FromString(data)
        kind = message.WhichOneof("type")
        if kind == "script_finished":
            name = ForwardMsg.ScriptFinishedStatus.Name(message.script_finished)
            if name == "FINISHED_EARLY_FOR_RERUN":
                return False
            if name not in GOOD_ENDS:
                self.errors.append(name)
            return True
        if kind == "navigation":
            self.pages = {p.url_pathname: p.page_script_hash for p in message.navigation.app_pages}
        elif kind == "page_info_changed":
            self.query = message.page_info_changed.query_string
        elif kind == "auto_rerun":
            self._start_clock(message.auto_rerun.fragment_id, message.auto_rerun.interval)
        elif kind == "delta" and message.delta.WhichOneof("type") == "new_element":
            self._note(message)
        return False

    def _note(self, message: ForwardMsg) -> None:
        element, fragment = message.delta.new_element, message.delta.fragment_id
        kind = element.WhichOneof("type")
        if kind == "exception":
            self.errors.append(f"{element.exception.type}: {element.exception.message}")
        elif kind == "alert" and element.alert.format == ALERT_ERROR:
            self.errors.append(element.alert.body)
        elif kind == "slider" and element.slider.options:
            slider = element.slider
            options = tuple(slider.options)
            at = slider.raw_value[0] if slider.raw_value else options[int(slider.default[0])]
            state = WidgetState(id=slider.id)
            state.string_array_value.data[:] = [at]
            self.widgets.setdefault(slider.id, Widget("slider", options, state, fragment))
        elif kind == "radio":
            options = tuple(element.radio.options)
            state = WidgetState(id=element.radio.id)
            self.widgets.setdefault(element.radio.id, Widget("radio", options, state, fragment))

    def _start_clock(self, fragment: str, every_s: float) -> None:
        if fragment not in self.clocks:
            self.clocks[fragment] = asyncio.create_task(self._tick(fragment, every_s))

    async def _tick(self, fragment: str, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self._rerun(fragment)

    def _stop_clocks(self) -> None:
        for clock in self.clocks.values():
            clock.cancel()
        self.clocks.clear()


async def opened(url: str) -> Tab:
    """Connect as a browser does; ``url`` is the dashboard's."""
    address = url.rstrip("/").replace("http", "ws", 1) + "/_stcore/stream"
    stream = await connect(
        address, subprotocols=["streamlit"], max_size=None, compression=None, origin=None
    )  # type: ignore[call-arg]
    return Tab(stream)
