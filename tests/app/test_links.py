"""Choices live in the URL, follow a person from page to page, and give way to a new URL."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest


def page() -> None:
    import streamlit as st

    from app import links

    def show() -> None:
        module = links.select("Module", "module", ["a", "b", "b2"], format_func=lambda m: m[0])
        role = links.pick("Role", "role", ["x", "y"], default="y")
        step = links.slide("Step", "step", st.session_state.get("steps", [0, 5, 10]))
        st.text(f"{module} {role} {step}")

    show()


def shown(app: AppTest) -> str:
    assert not app.exception
    return app.text[-1].value


def test_defaults_are_written_to_the_url() -> None:
    app = AppTest.from_function(page).run()
    assert shown(app) == "a y 0"
    assert dict(app.query_params) == {"module": "a", "role": "y", "step": "0"}


def test_a_link_is_followed() -> None:
    app = AppTest.from_function(page)
    app.query_params.update({"module": "b2", "role": "x", "step": "10"})
    assert shown(app.run()) == "b2 x 10"


def test_a_link_to_what_is_not_on_offer_says_so_until_somebody_chooses() -> None:
    app = AppTest.from_function(page)
    app.query_params.update({"module": "zz", "step": "<b>"})
    assert shown(app.run()) == "a y 0"
    said = [m.value.replace("\\", "") for m in app.markdown]
    assert any(
        "Module `zz`, which the address asks for, is not there; a is shown." in t for t in said
    )
    assert any("Step `<b>`" in t for t in said)
    assert shown(app.run()) == "a y 0"
    assert len(app.markdown) == 2
    app.select_slider[0].set_value(5).run()
    app.selectbox[0].set_value("b").run()
    assert shown(app) == "b y 5"
    assert not app.markdown
    assert app.query_params["step"] == "5"


def test_a_link_that_names_nothing_asks_for_nothing() -> None:
    app = AppTest.from_function(page)
    app.query_params.update({"module": "", "step": ""})
    assert shown(app.run()) == "a y 0"
    assert not app.markdown


def test_widgets_write_the_url_and_a_new_url_moves_the_widgets() -> None:
    app = AppTest.from_function(page).run()
    app.selectbox[0].set_value("b").run()
    app.select_slider[0].set_value(5).run()
    assert shown(app) == "b y 5"
    assert app.query_params["module"] == "b"
    assert app.query_params["step"] == "5"
    app.query_params["step"] = "10"
    assert shown(app.run()) == "b y 10"
    assert app.select_slider[0].value == 10


def test_options_with_one_label_stay_apart() -> None:
    app = AppTest.from_function(page).run()
    assert app.selectbox[0].options == ["a", "b (b)", "b (b2)"]
    assert shown(app.selectbox[0].set_value("b2").run()) == "b2 y 0"


def test_a_value_that_is_no_longer_on_offer_gives_way() -> None:
    app = AppTest.from_function(page).run()
    app.select_slider[0].set_value(10).run()
    app.session_state["steps"] = [0, 5]
    assert shown(app.run()) == "a y 0"


def test_one_option_is_shown_as_text() -> None:
    app = AppTest.from_function(page)
    app.session_state["steps"] = [7]
    assert shown(app.run()) == "a y 7"
    assert not app.select_slider


def test_the_session_remembers_when_the_url_forgets() -> None:
    """Streamlit drops the URL's parameters when a person walks to another page."""
    app = AppTest.from_function(page).run()
    app.selectbox[0].set_value("b").run()
    app.query_params.clear()
    assert shown(app.run()) == "b y 0"
    assert app.query_params["module"] == "b"
