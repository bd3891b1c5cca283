"""The page at `/`: what can be read off its files, and (marked `browser`) what Chromium makes of it."""

import re
import threading
import tomllib
from html.parser import HTMLParser

import pytest

from specprefill_jax.timing import LABELS
from specprefill_jax.view.report import REASONS

from .chromium import CTRL, SHIFT, Chromium, Page
from .page_stub import STATIC, Stub, forced, kept, render

HTML = (STATIC / "index.html").read_text(encoding="utf-8")
SCRIPT = (STATIC / "app.js").read_text(encoding="utf-8")
STYLE = (STATIC / "style.css").read_text(encoding="utf-8")


class Structure(HTMLParser):
    """The elements of the page: tag and attributes, and what stands inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self.feed(HTML)

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.lasttag in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.fixture(scope="module")
def structure() -> Structure:
    return Structure()


def values(structure: Structure, name: str) -> list[str]:
    return [attributes[name] for _, attributes in structure.elements if attributes.get(name) is not None]


def test_ids_are_unique_and_those_referred_to_exist(structure):
    ids = values(structure, "id")
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'byId\("([\w-]+)"\)', SCRIPT))
    assert len(used) > 20
    for name in ("for", "aria-labelledby", "aria-describedby"):
        used |= set(values(structure, name))
    used |= {target.removeprefix("#") for target in values(structure, "href") if target.startswith("#")}
    used |= set(re.findall(r"#([a-z][\w-]*)(?=[^{}]*\{)", STYLE))
    assert used - set(ids) == set()
    assert SCRIPT.count("getElementById") == 1  # every id goes through byId, and so through this test


def test_every_field_has_a_label(structure):
    labelled = set(values(structure, "for"))
    fields = [attributes for tag, attributes in structure.elements if tag in ("input", "textarea", "select")]
    assert len(fields) == 6
    assert [field["id"] for field in fields if field["id"] not in labelled and "aria-labelledby" not in field] == []
    assert all(attributes.get("type") for tag, attributes in structure.elements if tag == "button")


def test_nothing_is_inline_so_that_the_content_policy_holds(structure):
    assert structure.inline == []
    assert values(structure, "style") == []
    handlers = [name for _, attributes in structure.elements for name in attributes if name.startswith("on")]
    assert handlers == []
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "eval(",
        "Function(",
        "document.write",
        ".cssText",
    ):
        assert forbidden not in SCRIPT


def test_files_are_named_relative_to_the_page_and_exist(structure):
    named = [*values(structure, "src"), *(target for target in values(structure, "href") if not target.startswith("#"))]
    assert sorted(named) == ["app.js", "icon.svg", "style.css"]
    assert sorted(path.name for path in STATIC.iterdir()) == sorted([*named, "index.html"])
    assert re.findall(r"url\(|@import", STYLE) == []
    routes = set(re.findall(r'"((?:/|v1/|tokenize|detokenize)[\w/]*)"', SCRIPT))
    assert routes == {"v1/models", "v1/chat/completions", "v1/completions", "tokenize", "detokenize"}


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_no_address_of_another_host_is_named(path):
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # a name, not a place
    assert re.findall(r"\w+://|[\"'(]//", text) == []


def test_the_key_is_kept_for_the_tab_only():
    assert "localStorage" not in SCRIPT
    assert "document.cookie" not in SCRIPT
    assert "indexedDB" not in SCRIPT
    assert set(re.findall(r"sessionStorage\.\w+\(\"([\w-]+)\"", SCRIPT)) == {"specprefill-key"}


def table(name: str) -> dict[str, str]:
    """A table of words in the script."""
    found = re.search(rf"const {name} = \{{(.*?)\}};", SCRIPT, re.DOTALL)
    assert found
    return dict(re.findall(r'(\w+): "([^"]*)"', found[1]))


def test_reasons_and_phases_are_in_the_words_of_the_command_line():
    assert table("REASONS") == {str(reason): words for reason, words in REASONS.items()}
    assert table("PHASES") == LABELS


def test_colours_are_those_of_the_written_map():
    def tokens(style: str) -> dict[str, str]:
        return dict(re.findall(r"(--[\w-]+): ([^;]+);", style))

    view = (STATIC.parents[1] / "view" / "page.css").read_text(encoding="utf-8")
    mine, theirs = tokens(STYLE), tokens(view)
    assert {name for name in mine if mine[name] != theirs.get(name)} == {"--alarm"}
    assert set(re.findall(r"var\((--[\w-]+)\)", STYLE)) == set(mine)


def test_the_files_are_in_the_wheel():
    project = tomllib.loads((STATIC.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["specprefill_jax"]
    package = STATIC.parents[1]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert set(STATIC.iterdir()) <= packed


# In Chromium

browser_test = pytest.mark.browser
TEXT = "".join(f"Line {index} of a text with an owl 🦉 and naïve words.\n" for index in range(40))
QUESTION = "Who flies?"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def stub():
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.hold.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def page(chromium, stub):
    opened = chromium.page(stub.url)
    yield opened
    assert opened.complaints() == []
    opened.close()


def fill(page: Page, text: str = TEXT, question: str = QUESTION, rate: str = "12.5") -> None:
    page.type("#text", text)
    page.type("#question", question)
    page.type("#rate", rate)
    page.type("#max-tokens", "40")


def run(page: Page) -> None:
    page.press("Enter", CTRL)
    page.wait("document.querySelector('#stop').hidden && !document.querySelector('#results').hidden")


def alert(page: Page) -> str:
    return page.text("#error")


@browser_test
def test_both_ways_are_asked_one_after_the_other_and_shown(page, stub):
    fill(page)
    run(page)
    content = f"{TEXT}\n\n{QUESTION}"
    sparse, dense = stub.paths("v1/chat/completions")
    assert sparse.body == {
        "model": "tiny-main",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "specprefill": {"enabled": True, "keep_rate": 0.125, "map": True},
    }
    assert dense.body == {**sparse.body, "specprefill": {"enabled": False}}
    assert (sparse.authorization, stub.most_answering) == (None, 1)

    # What the model says is text, and never markup.
    assert page.text("#sparse-answer") == "The <b>sparse</b> é🦉."
    assert page.text("#dense-answer") == "The <b>dense</b> é🦉."
    assert page.text("#sparse-note") == "5 tokens, cut at the limit"
    assert page.run("[...document.querySelectorAll('.said')].map(each => each.ariaBusy)") == ["false", "false"]

    tokens = len(render(sparse.body))
    reading = stub.reading(sparse.body, tokens)
    share = f"{reading['kept_tokens'] / tokens * 100:.1f} %"
    figures = page.run("[...document.querySelectorAll('.figures dd')].map(each => each.textContent)")
    assert figures == [share, "1.24 s", "3.10 s", "2.50x"]
    assert page.text("#sparse-why") == (
        f"Read {reading['kept_tokens']:,} of {tokens:,} tokens: the speculator chose what to read."
    )
    assert page.text("#dense-why") == f"Read whole, {tokens:,} tokens: sparse prefill was switched off."
    assert page.text("#status") == "Done. Read sparsely, the first token came 2.50 times as fast."
    rows = page.run(
        "[...document.querySelectorAll('#times tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row for row in rows if "browser" not in row[0]] == [
        ["tokenise", "10 ms", "10 ms"],
        ["wait in the queue", "–", "–"],
        ["speculate", "500 ms", "–"],
        ["score and choose", "90 ms", "–"],
        ["main prefill", "600 ms", "3.05 s"],
        ["first token", "40 ms", "40 ms"],
        ["to the first token", "1.24 s", "3.10 s"],
        ["decode", "1.00 s", "1.00 s"],
        ["total", "2.24 s", "4.10 s"],
    ]
    [seen] = [row for row in rows if "browser" in row[0]]
    assert all(re.fullmatch(r"[\d.]+ m?s", cell) for cell in seen[1:])


@browser_test
def test_the_map_shows_which_chunks_and_which_words_were_kept(page, stub):
    fill(page)
    run(page)
    prompt = render(stub.paths("v1/chat/completions")[0].body)
    chunks = -(-len(prompt) // 32)
    drawn = page.run(
        "[...document.querySelectorAll('#strip rect')]"
        ".map(r => [r.getAttribute('x'), r.getAttribute('width'), r.classList[0]])"
    )
    cells = ["0"] * chunks
    for x, width, kind in drawn:
        for chunk in range(int(x), int(x) + int(width)):
            cells[chunk] = kind
    mask, always = kept(chunks), forced(chunks)
    kinds = ["f" if always[chunk] == "1" else "k" if mask[chunk] == "1" else "0" for chunk in range(chunks)]
    assert cells == kinds
    words = f"{mask.count('1')} of {chunks} chunks of 32 tokens were kept, 2 of them whatever their score"
    assert page.text("#map-caption") == f"{words}. The text runs from left to right."
    assert page.run("document.querySelector('#strip').getAttribute('aria-label')") == words

    # The text is fetched after the answers, and is whole again although chunks cut characters and spaces are lost.
    page.wait("document.querySelector('#more').hidden && !document.querySelector('#prompt').hidden")
    paths = [asked.path for asked in stub.asked if asked.path != "v1/models"]
    assert paths[:3] == ["v1/chat/completions", "v1/chat/completions", "tokenize"]
    parts = page.run(
        "[...document.querySelectorAll('#prompt > :not(#more)')]"
        ".map(part => [part.tagName, part.className, part.textContent])"
    )
    assert "".join(text for _, _, text in parts) == prompt.decode()
    assert parts[0] == ["MARK", "f", prompt[:32].decode()]
    assert parts[1][:2] == ["SPAN", ""]
    assert parts[-1][:2] == ["MARK", "f"]
    # A character that is cut belongs to the part that completes it.
    assert all(abs(len(text.encode()) - 32) < 4 for tag, kind, text in parts if (tag, kind) == ("MARK", ""))

    page.click("#only")
    assert page.run("document.querySelector('#only').ariaPressed") == "true"
    gap = page.run("getComputedStyle(document.querySelector('#prompt > span'), '::before').content")
    assert re.fullmatch('"?32"? ?"? tokens left out"', gap)


@browser_test
def test_a_long_text_is_fetched_as_it_is_scrolled_to(page, stub):
    fill(page, TEXT * 4)
    run(page)
    total = len(render(stub.paths("v1/chat/completions")[0].body))
    parts = "document.querySelectorAll('#prompt > :not(#more)').length"
    page.wait("document.querySelector('#strip').classList.contains('ready')")
    first = page.wait(parts)
    # Chunks are kept in turn of one and left out in runs of three: two parts for four chunks.
    assert first < total / 64 / 2
    page.click("#strip", across=0.5)
    page.wait("document.querySelector('#prompt .here')")
    middle = page.run(parts)
    assert abs(middle - total / 64 / 2) < total / 64 / 4
    page.run("document.querySelector('#prompt').focus()")
    page.wait(
        "(box => { box.scrollTop = box.scrollHeight; return document.querySelector('#more').hidden; })"
        "(document.querySelector('#prompt'))"
    )
    assert page.run("document.querySelector('#prompt').innerText.endsWith('<answer>')")
    text = "[...document.querySelectorAll('#prompt > :not(#more)')].map(part => part.textContent).join('')"
    assert page.run(text) == f"<user>{TEXT * 4}\n\n{QUESTION}<answer>"


@browser_test
def test_a_prompt_that_was_read_whole_says_why(page, stub):
    fill(page)
    for reason, words in REASONS.items():
        if reason == "engaged":
            continue
        stub.reason = (str(reason), None)
        run(page)
        assert page.text("#sparse-why").endswith(f"tokens: {words}.")
        assert page.text("#status") == f"Done. The prompt was read whole both times: {words}."
    assert page.text("#figure-read") == "100.0 %"
    assert page.text("#figure-speedup") == "–"
    assert page.text("#map-caption").startswith("All ")
    assert stub.paths("tokenize") == []


@browser_test
def test_details_and_the_cache_are_told(page, stub):
    stub.reason = ("speculator_failed", "out of memory")
    stub.cached_tokens = 1024
    fill(page)
    run(page)
    assert page.text("#sparse-why").endswith(
        "the speculator failed (out of memory). 1,024 tokens came from the cache, so that a first reading takes longer."
    )


@browser_test
@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_request_and_the_rest(page, stub, how):
    stub.hold.clear()
    fill(page)
    page.press("Enter", CTRL)
    page.wait("document.querySelector('#sparse-answer').textContent === 'The '")
    assert page.text("#sparse-note").startswith("answering, ")
    assert (page.text("#status"), page.text("#dense-note")) == ("Reading sparsely", "comes next")
    assert page.run("document.querySelector('#run').ariaDisabled") == "true"
    assert page.run("document.querySelector('#sparse-answer').ariaBusy") == "true"
    assert page.run("getComputedStyle(document.querySelector('#state')).position") == "sticky"
    page.press("Enter", CTRL)  # does nothing while it runs
    if how == "button":
        page.run("document.querySelector('#stop').focus()")
        page.press("Enter")
    else:
        page.press("Escape")
    page.wait("document.querySelector('#status').textContent === 'Stopped.'")
    assert stub.gone.wait(10)  # the server saw the connection go
    assert len(stub.paths("v1/chat/completions")) == 1
    assert (page.text("#sparse-note"), page.text("#dense-note")) == ("stopped", "")
    assert alert(page) == ""
    if how == "button":
        assert page.run("document.activeElement.id") == "run"
    stub.hold.set()
    run(page)
    assert page.text("#dense-answer") == "The <b>dense</b> é🦉."


REFUSALS = (
    (400, {}, "prompt: 5000 tokens, allowed: up to 4096", "prompt: 5000 tokens, allowed: up to 4096"),
    (429, {"Retry-After": "7"}, "queue", "The server is full. Try again in 7 seconds."),
    (503, {"Retry-After": "1"}, "it ends", "It ends. Try again in 1 second."),
    (503, {}, "", "The server is not ready."),
    (413, {}, "up to 1 MB", "The text is longer than the server takes. Up to 1 MB."),
    (500, {}, "", "The server answered with status 500."),
)


@browser_test
def test_a_refusal_is_told_in_words(page, stub):
    fill(page)
    for status, headers, message, words in REFUSALS:
        stub.asked.clear()
        stub.refusal = (status, headers, message)
        run(page)
        assert (alert(page), page.text("#status"), page.text("#sparse-note")) == (words, "", "failed")
        assert len(stub.paths("v1/chat/completions")) == 1  # the second one would be refused too


BROKEN = {
    'data: {"error": {"message": "the device is lost"}}\n\ndata: [DONE]\n\n': "The server failed: the device is lost",
    "": "The connection ended before the answer did.",
}


@browser_test
def test_a_stream_that_breaks_is_told(page, stub):
    fill(page)
    for ending, words in BROKEN.items():
        stub.broken = ending
        run(page)
        assert (alert(page), page.text("#sparse-answer"), page.text("#sparse-note")) == (words, "The ", "failed")


@browser_test
def test_a_server_that_is_away_is_told_and_found_again(chromium, stub):
    page = chromium.page(stub.url)
    page.wait("document.querySelector('#model').textContent.includes('tiny-main')")
    assert page.text("#model") == "Main model tiny-main, up to 4,096 tokens of text and answer"
    fill(page)
    page.send("Network.enable")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.send("Network.emulateNetworkConditions", offline=True, **offline)
    run(page)
    assert alert(page) == "The server does not answer."
    page.send("Network.emulateNetworkConditions", offline=False, **offline)
    run(page)
    assert page.text("#status").startswith("Done.")
    assert alert(page) == ""
    assert page.complaints() == []
    page.close()


@browser_test
def test_a_loading_server_is_waited_for(chromium, stub):
    stub.models_status = 503
    page = chromium.page(stub.url)
    page.wait("document.querySelector('#model').textContent === 'The models are loading.'")
    stub.models_status = 200
    page.wait("document.querySelector('#model').textContent.includes('tiny-main')")
    page.close()


@browser_test
def test_the_key_goes_with_every_request_and_stays_in_the_tab(page, stub):
    stub.key = "secret-1"
    page.run("location.reload()")
    page.wait(
        "document.querySelector('#model')?.textContent === 'The server wants an API key, or does not know this one.'"
    )
    fill(page)
    run(page)
    assert alert(page) == "The server wants an API key, or does not know this one."
    page.type("#key", "secret-1")
    run(page)
    page.wait("document.querySelector('#more').hidden && !document.querySelector('#prompt').hidden")
    assert {asked.authorization for asked in stub.paths("v1/chat/completions", "tokenize", "detokenize")} == {
        "Bearer secret-1"
    }
    page.press("Tab")  # out of the field
    stored = "[sessionStorage['specprefill-key'], localStorage.length, document.cookie, location.search]"
    page.wait("sessionStorage.length")
    assert page.run(stored) == ["secret-1", 0, "", ""]
    page.type("#key", "ключ")
    run(page)
    assert alert(page) == "The API key holds a character that no key can have."


@browser_test
def test_a_model_without_chat_template_is_asked_for_a_completion(page, stub):
    stub.chat_template = False
    fill(page)
    run(page)
    paths = [asked.path for asked in stub.asked if "completions" in asked.path]
    assert paths == ["v1/chat/completions", "v1/completions", "v1/completions"]
    sparse, dense = stub.paths("v1/completions")
    assert sparse.body["prompt"] == dense.body["prompt"] == f"{TEXT}\n\n{QUESTION}"
    assert page.text("#dense-answer") == "The <b>dense</b> é🦉."
    page.wait("document.querySelector('#more').hidden && !document.querySelector('#prompt').hidden")
    assert [asked.body for asked in stub.paths("tokenize")] == [{"model": "tiny-main", "prompt": sparse.body["prompt"]}]


@browser_test
def test_the_keyboard_is_enough(page, stub):
    order = []
    for _ in range(9):
        page.press("Tab")
        order.append(page.run("document.activeElement.id || document.activeElement.className"))
    assert order == ["skip", "text", "example", "question", "rate-slider", "rate", "max-tokens", "key", "run"]
    page.run("document.querySelector('#example').focus()")
    page.press("Enter")
    text = page.run("document.querySelector('#text').value")
    assert len(text) > 4000
    assert "\n\nThe number of the tool locker is 4617.\n\n" in text
    assert page.run("document.querySelector('#question').value") == "What is the number of the tool locker?"
    assert page.text("#size") == f"{len(text):,} characters"
    page.run("document.querySelector('#rate-slider').focus()")
    page.press("ArrowRight")
    assert page.run("document.querySelector('#rate').value") == "31"
    page.press("Tab", SHIFT)
    assert page.run("document.activeElement.id") == "question"
    page.press("Enter")  # in a line of text, as in any form
    page.wait("document.querySelector('#status').textContent.startsWith('Done.')")
    assert stub.paths("v1/chat/completions")[0].body["specprefill"]["keep_rate"] == 0.31


@browser_test
def test_what_the_browser_can_refuse_is_not_sent(page, stub):
    page.press("Enter", CTRL)  # no text
    fill(page, rate="0")
    page.press("Enter", CTRL)
    assert page.run("document.activeElement.id") == "rate"
    assert page.run("document.querySelector('#results').hidden")
    assert stub.paths("v1/chat/completions") == []


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_need_no_scrolling_sideways(chromium, stub, scheme):
    page = chromium.page(stub.url, 320, 640, prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    fill(page, TEXT + "x" * 400)
    run(page)
    page.wait("!document.querySelector('#prompt').hidden")
    assert page.run("document.scrollingElement.scrollWidth") == 320
    paper = {"light": "rgb(246, 247, 245)", "dark": "rgb(20, 23, 26)"}[scheme]
    assert page.run("getComputedStyle(document.body).backgroundColor") == paper
    assert page.run("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert page.complaints() == []
    page.close()
