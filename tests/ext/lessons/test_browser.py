"""The lessons in a real browser: one server, one Chromium, measurements made beforehand."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from ampscope.ext.lessons.catalog import LESSONS
from app.ext.lessons.lesson_page import LESSON_ENTRIES
from tests.helpers import browser
from tests.helpers.lesson_runs import stored
from tests.helpers.wcag import TEXT, contrast, over

pytestmark = pytest.mark.browser
PAGES = {entry.name.split("_", 2)[2]: entry.name for entry in LESSON_ENTRIES.values()}
CHOSEN = "[data-testid=stButtonGroup] [data-selected=true], [role=tab][aria-selected=true]"
# Its text, its colour, and the backgrounds below it, topmost first.
LOOK = """chosen => {
    const below = [];
    for (let one = chosen; one; one = one.parentElement)
        below.push(getComputedStyle(one).backgroundColor);
    return [chosen.innerText, getComputedStyle(chosen.querySelector("p")).color, below];
}"""
CUT = """() => [...document.querySelectorAll("[data-testid=stMain] [role=radio], main a, label")]
    .filter(one => one.checkVisibility() && one.getBoundingClientRect().right > innerWidth)
    .map(one => one.innerText)"""
# The browser loads what draws the frame's style after what draws tabs.
STYLED = """() => [...document.querySelectorAll("style")].some(
    one => one.textContent.includes("stButtonGroup"))"""
MEASURED = [name for name in PAGES if LESSONS[name].is_measured]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard on a store that holds every lesson but the one that is to be measured live."""
    folder = tmp_path_factory.mktemp("learn")
    for lesson in MEASURED:
        stored(folder / "runs.db", lesson)
    with browser.Servers(folder) as servers:
        yield servers.start(folder / "runs.db")


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Page]:
    """One page for all lessons, as a learner has it."""
    with browser.page_of(chromium) as found:
        yield found


@pytest.mark.parametrize("lesson", MEASURED)
def test_a_lesson_reveals_its_measurement(page: Page, url: str, lesson: str) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{url}/{PAGES[lesson]}?guess{LESSONS[lesson].number}=")
    browser.settle(page)
    main = page.get_by_test_id("stMain")
    expect(main.get_by_text("Predict first.")).to_be_visible()
    hide = main.get_by_role("button", name="Hide the answer")
    if hide.count():  # an earlier visit's choice is remembered
        hide.click()
        browser.settle(page)
    assert main.locator(".js-plotly-plot").count() == 0
    main.get_by_role("button", name="Show without a prediction").click()
    expect(main.get_by_text("Measured.").first).to_be_visible()
    expect(main.locator(".js-plotly-plot").first).to_be_visible()
    assert main.get_by_test_id("stException").count() == 0
    assert main.get_by_test_id("stAlertContentError").count() == 0
    expect(page).to_have_url(re.compile(f"guess{LESSONS[lesson].number}=show"))
    assert not errors


@pytest.fixture(scope="module")
def phone(chromium: Browser) -> Iterator[Page]:
    """A narrow window in the dark theme."""
    with browser.page_of(chromium, 390, 844, "dark") as found:
        yield found


@pytest.mark.slow  # every lesson is measured first
@pytest.mark.parametrize("lesson", MEASURED)
def test_choices_are_read_on_a_phone_in_the_dark(phone: Page, url: str, lesson: str) -> None:
    phone.goto(f"{url}/{PAGES[lesson]}?guess{LESSONS[lesson].number}=show")
    browser.settle(phone)
    expect(phone.get_by_text("Measured.").first).to_be_visible()
    expect(phone.get_by_role("tab", name="PyTorch")).to_be_visible()
    phone.wait_for_function(STYLED)
    phone.evaluate("() => document.fonts.ready.then(() => null)")
    assert phone.evaluate(CUT) == []
    for chosen in phone.locator(CHOSEN).all():
        text, color, below = chosen.evaluate(LOOK)
        background = over(below)
        assert background != "#ffffff", "the theme is not dark"
        assert contrast(over([color, *below]), background) >= TEXT, text


def test_a_mistake_is_predicted_before_it_is_diagnosed(page: Page, url: str) -> None:
    page.goto(f"{url}/learn_13_mistakes?mistake13=bce_loss")
    browser.settle(page)
    main = page.get_by_test_id("stMain")
    expect(main.get_by_text("criterion = nn.BCELoss()")).to_be_visible()
    assert main.get_by_role("button", name="Diagnose it").count() == 0
    main.get_by_role("button", name="Show without a prediction").click()
    expect(main.get_by_role("button", name="Diagnose it").first).to_be_enabled()
    browser.settle(page)
    main.get_by_text("The fixed script").click()
    expect(main.get_by_text("+criterion = nn.BCEWithLogitsLoss()")).to_be_visible()


def test_a_link_opens_exactly_that_view(page: Page, url: str) -> None:
    page.goto(f"{url}/learn_03_underflow?guess3=c&scale3=65536.0&type=large")
    browser.settle(page)
    main = page.get_by_test_id("stMain")
    expect(main.get_by_text("As you predicted.")).to_be_visible()
    expect(main.get_by_text("At 2^16,")).to_be_visible()
    page.wait_for_function("getComputedStyle(document.documentElement).fontSize === '24px'")


def test_the_keyboard_answers_and_large_type_stays_through_links(page: Page, url: str) -> None:
    page.goto(f"{url}/learn_01_numbers?type=large&guess1=show")
    browser.settle(page)
    page.get_by_role("button", name="Hide the answer").press("Enter")
    expect(page.get_by_role("button", name="Show without a prediction")).to_be_visible()
    browser.settle(page)
    radio = page.get_by_role("radio").first
    radio.focus()
    radio.press("Space")
    expect(page.get_by_text("You predicted:")).to_be_visible()
    page.get_by_role("radio").first.press("ArrowDown")
    expect(page.get_by_text("As you predicted.")).to_be_visible()
    page.get_by_test_id("stMain").get_by_role("link").last.press("Enter")
    expect(page.get_by_test_id("stMain").locator("h1").first).not_to_have_text("1 Numbers")
    browser.settle(page)
    expect(page).to_have_url(re.compile("type=large"))
    page.wait_for_function("getComputedStyle(document.documentElement).fontSize === '24px'")


def test_a_lesson_is_measured_when_it_is_first_asked(page: Page, url: str) -> None:
    page.goto(f"{url}/learn_03_underflow?model3=lenet&loss3=usual&guess3=a")
    browser.settle(page)
    main = page.get_by_test_id("stMain")
    main.get_by_role("button", name="Measure on this machine").click()  # an address starts nothing
    expect(main.get_by_text("As you predicted.")).to_be_visible()
    expect(main.locator(".js-plotly-plot").first).to_be_visible()


@pytest.mark.timeout(400)
def test_a_newcomer_walks_from_home_to_a_diagnosis(page: Page, url: str) -> None:
    page.goto(url)
    browser.settle(page)
    page.get_by_test_id("stMain").get_by_role("link", name="All lessons").click()
    for title in ("1 Numbers", "3 Underflow and loss scaling", "6 Why model.half() fails"):
        expect(page.get_by_test_id("stMain").locator("h1").first).to_have_text("Learn")
        page.get_by_test_id("stMain").get_by_role("link", name=title).first.click()
        expect(page.get_by_test_id("stMain").locator("h1").first).to_have_text(title)
        browser.settle(page)
        page.get_by_test_id("stSidebarNav").get_by_role("link", name="Learn", exact=True).click()
    expect(page.get_by_test_id("stMain").locator("h1").first).to_have_text("Learn")
    page.get_by_role("link", name="6 Why model.half() fails").first.click()
    browser.settle(page)
    page.get_by_text("Its loss becomes NaN").click()
    page.get_by_role("button", name="Diagnose it").click(timeout=60_000)
    page.get_by_role("link", name="Open the diagnosis").click(timeout=180_000)
    browser.settle(page)
    expect(page.get_by_text("Optimizer state left the half-precision range").first).to_be_visible()
    expect(page.get_by_text("and the symptom was gone").first).to_be_visible()
