"""The built site in a headless browser; needs chromium and chromedriver."""

import functools
import http.server
import shutil
import threading
import time

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.browser

PAGES = ["index", "tutorials/trl_interop", "contracts", "pitfalls", "scaling", "404"]
TUTORIAL = "tutorials/trl_interop"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def resize(browser, width):
    metrics = {
        "width": width,
        "height": 900,
        "deviceScaleFactor": 1,
        "mobile": width < 500,
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.parametrize("page", PAGES)
def test_page_is_quiet_and_stays_at_home(browser, address, page):
    browser.get(f"{address}{page}.html")
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    home = (address, "data:")
    assert not [url for url in loaded if not url.startswith(home)]
    if page != "404":  # its links have the prefix that the published site has
        assert not [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    browser.get_log("browser")


@pytest.mark.parametrize("page", PAGES)
def test_no_sideways_scrolling_on_a_phone(browser, address, page):
    resize(browser, 390)
    browser.get(f"{address}{page}.html")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    resize(browser, 1280)


def test_theme_switch_changes_the_colours(browser, address):
    resize(browser, 1280)
    browser.get(f"{address}{TUTORIAL}.html")
    colours = set()
    for mode in ("light", "dark"):
        browser.execute_script(
            "localStorage.setItem('mode', arguments[0]);"
            "localStorage.setItem('theme', arguments[0])",
            mode,
        )
        browser.refresh()
        body = browser.find_element(By.TAG_NAME, "body")
        colours.add(body.value_of_css_property("background-color"))
        theme = browser.find_element(By.TAG_NAME, "html").get_attribute("data-theme")
        assert theme == mode
    assert len(colours) == 2


def test_search_finds_reward_trainer(browser, address):
    browser.get(f"{address}search.html?q=RewardTrainer")
    results = WebDriverWait(browser, 10).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, "ul.search li a")
    )
    assert any("trl_interop" in result.get_attribute("href") for result in results)


def test_copy_button_copies_code(browser, address):
    browser.get(f"{address}{TUTORIAL}.html")
    origin = {"origin": address, "permissions": ["clipboardReadWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", origin)
    button = browser.find_element(By.CSS_SELECTOR, "div.highlight-Python button.copybtn")
    ActionChains(browser).scroll_to_element(button.find_element(By.XPATH, "..")).perform()
    ActionChains(browser).move_to_element(button).click().perform()
    time.sleep(0.5)
    copied = browser.execute_async_script(
        "navigator.clipboard.readText().then(arguments[0], e => arguments[0](String(e)))"
    )
    assert copied.startswith("import math")
    assert ">>>" not in copied


def test_keyboard_focus_is_visible(browser, address):
    browser.get(f"{address}{TUTORIAL}.html")
    body = browser.find_element(By.TAG_NAME, "body")
    for _ in range(4):
        body.send_keys(Keys.TAB)
        focused = browser.switch_to.active_element
        style = [
            focused.value_of_css_property(p) for p in ("outline-style", "box-shadow")
        ]
        assert style != ["none", "none"], focused.get_attribute("outerHTML")[:200]
        body = focused
