"""Hooks and wrappers of ampscope that are left out for a while: all others stay, all come back."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from torch import nn
from torch.nn.modules import module as tables

from ampscope.capture.global_hooks import FORWARD, FORWARD_PRE, no_own_module_hooks
from ampscope.patches import Patches, unpatched


def _hooks() -> tuple[list[object], list[object]]:
    pre, after = tables._global_forward_pre_hooks, tables._global_forward_hooks
    return list(pre.values()), list(after.values())


def test_hooks_without_a_module_stay_and_own_ones_come_back() -> None:
    own = [FORWARD_PRE.subscribe(lambda *_: None), FORWARD.subscribe(lambda *_: None)]
    hook = [].append  # a builtin method: its __module__ is None
    assert hook.__module__ is None
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        with no_own_module_hooks():
            assert _hooks() == ([], [hook])
        assert _hooks() == ([FORWARD_PRE], [FORWARD, hook])
    finally:
        handle.remove()
        for one in own:
            one.remove()
    assert _hooks() == ([], [])


def test_hooks_removed_meanwhile_do_not_come_back() -> None:
    own = FORWARD.subscribe(lambda *_: None)
    with no_own_module_hooks():
        own.remove()
    assert _hooks() == ([], [])
    own = FORWARD.subscribe(lambda *_: None)
    with no_own_module_hooks():
        own.remove()
        own = FORWARD.subscribe(lambda *_: None)
    assert _hooks() == ([], [FORWARD]), "once, not twice"
    own.remove()
    assert _hooks() == ([], [])


def test_hooks_that_were_taken_come_back_where_taking_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = FORWARD_PRE.subscribe(lambda *_: None)
    with monkeypatch.context() as patch:
        patch.delattr(tables, "_global_forward_hooks")
        with pytest.raises(AttributeError), no_own_module_hooks():
            pass
    assert _hooks() == ([FORWARD_PRE], [])
    own.remove()


def _wrapped(original: object) -> object:
    return ("wrapped", original)


def test_an_attribute_is_unpatched_until_the_last_has_left() -> None:
    owner, patches = SimpleNamespace(value="plain"), Patches()
    patches.replace(owner, "value", _wrapped)
    inside, left = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        with unpatched(owner, "value"):
            inside.set()
            left.wait(60)
            seen.append(owner.value)

    thread = threading.Thread(target=other)
    with unpatched(owner, "value"):
        thread.start()
        assert inside.wait(60)
        with unpatched(owner, "value"):
            assert owner.value == "plain"
        assert owner.value == "plain", "inside the outer one still"
    assert owner.value == "plain", "the other thread is inside"
    left.set()
    thread.join()
    assert seen == ["plain"]
    assert owner.value == ("wrapped", "plain")
    patches.undo()
    assert owner.value == "plain"


def test_wrappers_that_come_and_go_while_unpatched() -> None:
    class Owner:
        value = "plain"

    class Heir(Owner):
        pass

    first, second = Patches(), Patches()
    first.replace(Heir, "value", _wrapped)
    with unpatched(Heir, "value"):
        second.replace(Heir, "value", _wrapped)
        first.undo()
        assert Heir.value == "plain"
    assert Heir.value == ("wrapped", "plain")
    second.undo()
    assert "value" not in vars(Heir)
    with unpatched(Heir, "value"):
        first.replace(Heir, "value", _wrapped)
        assert Heir.value == "plain"
        first.undo()
    assert "value" not in vars(Heir)
