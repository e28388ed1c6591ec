"""The page at `/` in a real browser: one file, no errors, an answer that streams in, tokens that say how sure the model was, a pool."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from cb_ray.serving.http import build_http_app
from cb_ray.serving.operations import _PAGE
from cb_ray.serving.settings import DoorSettings
from tests.serving.doors import FakeSource, listening, make_model, no_board

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SAYS = "Paris, of course"
REPLICA = {"slots": 4, "leases": 1, "stalled": 0, "owed_s": 0.5, "cache_used": 0.25}


class FakePool:
    """A pool's view with one replica, whose news come when `news` is set."""

    def __init__(self) -> None:
        self.lookout = no_board()

    async def watch(self, seen: int) -> tuple[int, dict[str, Any]]:
        if seen >= 0:
            await asyncio.Event().wait()
        return 1, await self.snapshot()

    async def snapshot(self) -> dict[str, Any]:
        counters = {"granted": 4, "refused": 2, "prompt_tokens": 100, "cached_tokens": 75}
        books = {"waiting": 3, "limit": 8, "owed_s": 1.5, "index_pages": 2, "counters": counters, "reasons": {"cached_prefix": 4}}
        return {**books, "replicas": {"replica-one": REPLICA}}

    async def decision(self, request_id: str) -> dict[str, Any]:
        return {"replica": "replica-one", "waited_s": 0.0, "reason": "cached_prefix", "predicted_cached_tokens": 7}


def app(**settings: Any) -> Any:
    model = make_model()
    pool: Any = FakePool()
    return build_http_app(model, FakeSource(codec=model.codec, says=SAYS), DoorSettings(**settings), pool=pool)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("chromium")
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"):
        options.add_argument(f"--{flag}")
    for flag in (
        "disable-features=BackForwardCache",
        "disable-component-update",
        "disable-sync",
        "disable-dev-shm-usage",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@contextlib.contextmanager
def visit(browser: Any, app: Any) -> Iterator[None]:
    """The page of `app` in the browser, left at the end, so that the server may stop."""
    with listening(app) as url:
        browser.get(url)
        try:
            yield
        finally:
            browser.get("about:blank")


def until(browser: Any, script: str) -> Any:
    """What `script`, a JavaScript expression, gives once that is truthy."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda driver: driver.execute_script(f"return {script}"))


def ask(browser: Any, text: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.find_element(By.ID, "prompt").send_keys(text, Keys.ENTER)


@pytest.mark.parametrize("size", [(1280, 800), (360, 740)], ids=["desk", "phone"])
def test_a_chat_and_the_pool_beside_it(browser, size):
    """Ask, read the streamed answer, look at a token's probability and at the pool; nothing is wider than the screen, nothing fails."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser.get_log("browser")
    browser.set_window_size(*size)
    with visit(browser, app()):
        assert until(browser, "document.querySelector('#model').value") == "tiny"
        until(browser, "document.querySelector('#state').className === 'up'")
        ask(browser, "The capital of France?")
        until(browser, "document.querySelector('.facts').textContent")
        assert browser.find_element(By.CSS_SELECTOR, ".answer").text == SAYS
        facts = browser.find_element(By.CSS_SELECTOR, ".facts").text
        assert "7 cached" in facts and "replica replica-one (cached prefix)" in facts
        token = browser.find_elements(By.CSS_SELECTOR, ".token")[1]
        ActionChains(browser).move_to_element(token).perform()
        tip = browser.find_element(By.ID, "tip")
        assert "60.7 %" in tip.text and len(tip.text.splitlines()) == 3, "exp(-0.5), and the two next likeliest"
        tiles = browser.find_element(By.ID, "tiles").text.replace("\n", " ")
        assert "1 replica" in tiles and "3 / 8 waiting" in tiles and "75 % of prompts cached" in tiles
        assert "replica-one" in browser.find_element(By.ID, "replicas").text
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
    assert browser.get_log("browser") == []


def test_keys_are_asked_for_and_errors_are_told(browser):
    """With API keys the page itself is open, says what is missing, and works once a key is given."""
    with visit(browser, app(api_keys=("secret",))):
        until(browser, "document.querySelector('#state').className === 'down'")
        browser.execute_script(
            "const key = document.querySelector('#key'); key.value = 'secret'; key.dispatchEvent(new Event('change'))"
        )
        until(browser, "document.querySelector('#state').className === 'up'")
        ask(browser, "Hi")
        assert until(browser, "document.querySelector('.facts').textContent")
    browser.get_log("browser")


def test_the_page_is_one_file_that_asks_nobody_else():
    """No address but its own: it works without the internet, and tells nobody who reads it. Its policy says so to the browser."""
    text = _PAGE.read_text()
    assert re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", text) == [] and "@import" not in text
    assert [address for address in re.findall(r"https?://[^\"'\s)]+", text) if "www.w3.org" not in address] == []
