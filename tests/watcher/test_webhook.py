"""An alarm's webhook, against a server on the loopback."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.errors import BadInput
from ampscope.records import Event
from ampscope.watcher import webhook
from ampscope.watcher.webhook import Webhook

ALARM = Event(7, "alarm", "loss_spike", "The loss jumped; Capsule: /home/me/secret.", value=3.0)


class _Server(HTTPServer):
    answers: list[int]
    bodies: list[Any]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as made:
        made.answers, made.bodies = [], []
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "FIRST_PAUSE_S", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def sent(address: str) -> list[str]:
    said: list[str] = []
    hook = Webhook(address, said.append)
    hook.send([ALARM], "abc", "night run", 2)
    hook.close()
    return said


def _address(server: _Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/hook"


def test_it_holds_what_is_documented_and_nothing_else(server: _Server) -> None:
    assert sent(_address(server)) == []
    assert server.bodies == [{
        "text": "ampscope: loss_spike at step 7 of night run (rank 2).", "alarm": "loss_spike",
        "step": 7, "rank": 2, "run": "abc", "name": "night run",
    }]  # fmt: skip


def test_a_secret_in_the_name_of_the_run_is_not_sent(server: _Server) -> None:
    hook = Webhook(_address(server), lambda said: None)
    hook.send([ALARM], "abc", "night password=Hq7v2", 2)
    hook.close()
    (body,) = server.bodies
    assert body["name"] == "night password=***"
    assert "Hq7v2" not in str(body)


@pytest.mark.parametrize(
    ("answers", "came", "problem"),
    [
        ([500, 429], 3, ""),
        ([503] * 9, 4, "the answer was 503"),
        ([404] * 9, 1, "the answer was 404"),
        ([302] * 9, 1, "the answer was 302"),
    ],
)
def test_errors_of_the_server_are_tried_again(
    answers: list[int], came: int, problem: str, server: _Server
) -> None:
    server.answers = answers
    said = sent(_address(server))
    assert len(server.bodies) == came
    assert [problem in s for s in said] == ([True] if problem else [])


def test_nothing_listens_and_the_address_is_not_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (said,) = sent(f"http://127.0.0.1:{port}/secret-token")
    assert "secret" not in said


@pytest.mark.parametrize(
    "address", ["ftp://x/y", "file:///etc/passwd", "http://", "x", "http://a:z"]
)
def test_other_addresses_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="begins with http") as caught:
        ampscope.watch(nn.Linear(1, 1), store=tmp_path / "runs.db", webhook=address)
    assert address not in str(caught.value) or len(address) < 8


def test_an_alarm_of_a_training_arrives(server: _Server, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store, address = tmp_path / "runs.db", _address(server)
    with ampscope.watch(
        model, optimizer, store=store, every=0, policy="ignore", name="n", webhook=address
    ) as run:
        (model(torch.ones(1, 2)).sum() * torch.inf).backward()
        optimizer.step()
    assert {b["alarm"] for b in server.bodies} == {a.name for a in run.alarms} != set()
    assert {b["run"] for b in server.bodies} == {run.id}
    assert address.encode() not in b"".join(
        p.read_bytes() for p in tmp_path.iterdir() if p.is_file()
    )
