"""The console in a real browser, on a real cluster: everything that can be clicked is."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import PATIENT, Up, running

sync_api = pytest.importorskip("playwright.sync_api", reason="make test-operate installs it")
Page = sync_api.Page
expect = sync_api.expect

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

CHROMIUM = Path("/usr/bin/chromium")
TOKEN = secrets.token_hex(16)
# A node must answer what it is asked in this time, on a machine that does other things too.
PATIENCE_MS = 30_000


@pytest.fixture(scope="module", params=["one router", "two workers"])
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    token_file = tmp_path_factory.mktemp("console") / "token"
    token_file.write_text(TOKEN)
    workers = ("--workers", "2") if request.param == "two workers" else ()
    with running(
        "--prefill=1", "--decode=2", *workers, "--set=router.mode=remote", f"--set=router.admin_token_file={token_file}",
        "--set=router.console=127.0.0.1:0", *PATIENT,
    ) as up:  # fmt: skip
        yield up


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: object, up: Up) -> Iterator[Page]:
    """A page that has just been opened. Whatever it complains of fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})  # type: ignore[attr-defined]
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "Content Security" in said.text else None)
    page.goto(up.console)
    expect(page.locator("#nodes tbody tr")).to_have_count(3, timeout=PATIENCE_MS)
    yield page
    page.close()
    assert complaints == []


def say(page: Page, text: str, num_tokens: int) -> None:
    page.fill("#chat-tokens", str(num_tokens))
    page.fill("#chat-text", text)
    page.click("#chat-send")


def endless(page: Page) -> None:
    """Chats from now on end with their last token, not with what the model says."""

    def go_on(route: object) -> None:
        body = json.loads(route.request.post_data)  # type: ignore[attr-defined]
        route.continue_(post_data=json.dumps({**body, "ignore_eos": True}))  # type: ignore[attr-defined]

    page.route("**/api/chat", go_on)


def unlock(page: Page) -> None:
    page.fill("#token", TOKEN)
    page.click("#session button")
    expect(page.locator("#rights")).to_have_text("may change", timeout=PATIENCE_MS)


def confirming(page: Page) -> list[str]:
    """Says yes to every question of the page; the questions."""
    asked: list[str] = []

    def say_yes(dialog: object) -> None:
        asked.append(dialog.message)  # type: ignore[attr-defined]
        dialog.accept()  # type: ignore[attr-defined]

    page.on("dialog", say_yes)
    return asked


def noticed(page: Page, text: str) -> None:
    expect(page.locator("#notice")).to_contain_text(text, timeout=PATIENCE_MS)


def row(page: Page, node: str) -> object:
    return page.locator("#nodes tbody tr", has=page.get_by_role("button", name=node, exact=True))


def test_without_the_token_the_page_only_reads(page: Page) -> None:
    expect(page.locator("#rights")).to_have_text("read-only")
    expect(page.locator("button", has_text="Drain").first).to_be_hidden()
    expect(page.locator("#policy")).to_be_hidden()
    page.fill("#token", "not the token")
    page.click("#session button")
    noticed(page, "not the admin token")
    expect(page.locator("#rights")).to_have_text("read-only")


def test_a_chat_streams_and_shows_which_nodes_answered(page: Page) -> None:
    endless(page)
    say(page, "Write a function that adds", 64)
    route = page.locator("#chat-log .route")
    expect(route).to_contain_text("prefill-0 → decode-", timeout=PATIENCE_MS)
    expect(route).to_contain_text("64 tokens")
    assert len(page.locator("#chat-log .turn span").inner_text()) > 20
    route.get_by_role("button", name="explain").click()
    spans = page.locator("#detail-spans")
    for name in ("queue", "prefill", "KV transfer", "first token", "decode"):
        expect(spans).to_contain_text(name)
    expect(page.locator("#detail-text")).to_contain_text("chose remote prefill-0")
    page.click("#detail-close")
    expect(page.locator("#detail")).to_be_hidden()


def test_a_running_request_is_seen_explained_and_cancelled(page: Page) -> None:
    unlock(page)
    endless(page)
    say(page, "Go on for long", 1900)
    open_one = page.locator("#requests tbody tr:not(.faint)")
    expect(open_one).to_have_count(1, timeout=PATIENCE_MS)
    expect(open_one.locator(".bar i.decode")).to_be_visible(timeout=PATIENCE_MS)
    request = open_one.locator("button.link").inner_text()
    open_one.get_by_role("button", name="Cancel").click()  # nobody says yes, so nothing is done
    expect(open_one).to_have_count(1)
    asked = confirming(page)
    open_one.get_by_role("button", name=f"Cancel {request}").click()
    noticed(page, f"of request {request} ended")
    assert len(asked) == 1 and request in asked[0]
    expect(page.locator("#chat-log .route")).to_contain_text("cancelled by an operator", timeout=PATIENCE_MS)
    page.fill("#lookup-id", request)
    page.click("#lookup button")
    expect(page.locator("#detail-text")).to_contain_text("cancelled", timeout=PATIENCE_MS)


def test_an_ended_request_shows_its_real_tokens_and_times(page: Page) -> None:
    endless(page)
    say(page, "Go on for a while", 700)
    ended = page.locator("#requests tbody tr.faint")
    expect(ended.first).to_contain_text("700", timeout=PATIENCE_MS)
    assert "≥" not in ended.first.inner_text()
    expect(ended.first.locator(".bar i.prefill")).to_have_count(1)


def test_a_chat_can_be_stopped(page: Page) -> None:
    endless(page)
    say(page, "Go on for long", 1900)
    expect(page.locator("#chat-log .turn span")).not_to_be_empty(timeout=PATIENCE_MS)
    page.click("#chat-stop")
    expect(page.locator("#chat-log .route")).to_have_text("stopped")
    expect(page.locator("#requests tbody tr:not(.faint)")).to_have_count(0, timeout=PATIENCE_MS)


def test_a_node_is_described_cordoned_drained_and_taken_back(page: Page) -> None:
    unlock(page)
    node = row(page, "decode-1")
    node.get_by_role("button", name="decode-1", exact=True).click()  # type: ignore[attr-defined]
    expect(page.locator("#detail-text")).to_contain_text('"incarnation"', timeout=PATIENCE_MS)
    node.get_by_role("button", name="Cordon").click()  # type: ignore[attr-defined]
    expect(node.locator("td.cordoned")).to_be_visible(timeout=PATIENCE_MS)  # type: ignore[attr-defined]
    expect(page.locator("#events")).to_contain_text("decode-1", timeout=PATIENCE_MS)
    node.get_by_role("button", name="Uncordon").click()  # type: ignore[attr-defined]
    expect(node.locator("td.ready")).to_be_visible(timeout=PATIENCE_MS)  # type: ignore[attr-defined]
    asked = confirming(page)
    node.get_by_role("button", name="Drain decode-1").click()  # type: ignore[attr-defined]
    assert len(asked) == 1 and "decode-1" in asked[0]
    noticed(page, "node decode-1 is empty: it may be stopped")
    node.get_by_role("button", name="Uncordon").click()  # type: ignore[attr-defined]
    expect(node.locator("td.ready")).to_be_visible(timeout=PATIENCE_MS)  # type: ignore[attr-defined]


def test_a_role_is_flipped_and_flipped_back(page: Page) -> None:
    unlock(page)
    choice = page.get_by_label("Role of decode-1")
    choice.select_option("mixed")  # nobody says yes
    expect(choice).to_have_value("decode")
    asked = confirming(page)
    choice.select_option("mixed")
    noticed(page, "node decode-1 is a mixed node now")
    expect(page.locator("#pools")).to_contain_text("mixed", timeout=PATIENCE_MS)
    page.get_by_label("Role of decode-1").select_option("decode")
    noticed(page, "node decode-1 is a decode node now")
    assert len(asked) == 2


def test_the_policy_is_shadowed_and_compared(page: Page) -> None:
    unlock(page)
    page.fill("#policy-shadow", "kv-cost")
    page.click("#policy button")
    noticed(page, "shadow kv-cost from the next decision on")
    say(page, "One more", 4)
    expect(page.locator("#policies")).to_contain_text("decisions", timeout=PATIENCE_MS)
    page.fill("#policy-shadow", "no-such-policy")
    page.click("#policy button")
    noticed(page, "no-such-policy")
    page.wait_for_timeout(2500)  # looks come once a second
    noticed(page, "no-such-policy")
    page.get_by_role("button", name="Dismiss").click()
    expect(page.locator("#notice")).to_be_hidden()
    page.fill("#policy-shadow", "none")
    page.click("#policy button")
    expect(page.locator("#policies")).to_contain_text("no shadow", timeout=PATIENCE_MS)
    expect(page.locator("#caches")).to_contain_text("blocks")


def test_a_tables_row_stays_while_the_page_is_told_the_same(page: Page) -> None:
    """An open choice or a click must not be lost to the next look."""
    unlock(page)
    expect(page.get_by_label("Role of decode-0")).to_be_visible(timeout=PATIENCE_MS)
    page.evaluate("() => { window.kept = document.querySelector('#nodes select'); }")
    page.evaluate("() => { window.before = document.querySelector('#figures').firstChild; }")
    page.wait_for_function("() => document.querySelector('#figures').firstChild !== window.before")
    assert page.evaluate("() => window.kept.isConnected")


def test_a_console_that_died_comes_back_on_its_address(page: Page, up: Up) -> None:
    (console,) = [child for child in up.children() if "console" in child.cmdline() and "--listen-fd" in child.cmdline()]
    console.kill()
    expect(page.locator("#trouble")).to_contain_text("trying again", timeout=PATIENCE_MS)
    expect(page.locator("#trouble")).to_be_hidden(timeout=PATIENCE_MS)
    assert up.complete("def f(", 4)["choices"]
