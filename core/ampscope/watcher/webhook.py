"""An alarm as a POST to an address of the user's choice, from a thread of its own.

The training never waits: alarms are handed to a queue, and one that cannot be delivered after
:data:`TRIALS` attempts is dropped and noted in the run. What is sent is in docs/privacy.md, and
nothing else is::

    {"text": "ampscope: nonfinite_loss at step 40007 of night run (rank 0).",
     "alarm": "nonfinite_loss", "step": 40007, "rank": 0, "run": "1feaea4dad55",
     "name": "night run"}

``text`` is what Slack and Mattermost show of such a message.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence

from ampscope import __version__
from ampscope.errors import BadInput
from ampscope.masks import masked_text
from ampscope.records import Event

TIMEOUT_S = 5.0  # of one attempt
TRIALS = 4
FIRST_PAUSE_S = 1.0  # doubled after each attempt: 7 s in all
MOST_WAITING = 100  # alarms; a run with more of them has been reported well enough
CLOSING_S = 5.0  # that the end of a run waits for alarms that are still to be sent


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What is meant for one address goes to no other one."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """None: the answer counts as a failure."""


class Webhook:
    """Sends alarms to ``address``; ``said`` gets a sentence for one that could not be delivered."""

    def __init__(self, address: str, said: Callable[[str], None]) -> None:
        self._address = address
        self._said = said
        self._waiting: queue.Queue[dict[str, object] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send(self, alarms: Sequence[Event], run: str, name: str, rank: int) -> None:
        """Hand alarms over; returns at once."""
        name = masked_text(name)
        for alarm in alarms:
            text = f"ampscope: {alarm.name} at step {alarm.step} of {name} (rank {rank})."
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait({
                    "text": text, "alarm": alarm.name, "step": alarm.step, "rank": rank,
                    "run": run, "name": name,
                })  # fmt: skip
        if alarms and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ampscope-webhook", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for what is still to be sent, at most :data:`CLOSING_S`; again does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            thread.join(CLOSING_S)
            self._ends.set()

    def _work(self) -> None:
        while (message := self._waiting.get()) is not None:
            problem = self._deliver(json.dumps(message).encode())
            if problem:
                with contextlib.suppress(Exception):  # the run may have ended
                    self._said(f"The webhook did not get {message['alarm']}: {problem}.")

    def _deliver(self, body: bytes) -> str:
        """Why it was not delivered; "" where it was."""
        pause_s, problem = FIRST_PAUSE_S, ""
        for attempt in range(TRIALS):
            if attempt and self._ends.wait(pause_s * 2 ** (attempt - 1)):
                break
            headers = {"Content-Type": "application/json", "User-Agent": f"ampscope/{__version__}"}
            try:
                request = urllib.request.Request(self._address, body, headers, method="POST")
                with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                    answer.read(1)
                return ""
            except urllib.error.HTTPError as error:
                problem = f"the answer was {error.code}"
                error.close()
                if error.code < 500 and error.code not in (408, 429):
                    break  # the same request would be refused again
            except Exception as error:  # of any kind: a training must not hear of it
                problem = type(error).__name__  # its text may hold the address, a secret of its own
        return problem


def checked_address(address: str) -> str:
    """``address``, which must be one of HTTP. Raises BadInput without quoting it: it may hold a
    secret."""
    try:
        parts = urllib.parse.urlsplit(address)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine:
        raise BadInput("webhook is an address that begins with http:// or https://.")
    return address
