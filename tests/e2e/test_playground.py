"""The playground in a real browser, against a real service.

What the page shows is compared with what the service answered to that very call, so the tests
hold for any bundle that has all four tasks, however well it was trained.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from service.keys import make_key, record
from tests.conftest import ROOT
from tests.e2e.conftest import serving
from tests.json_files import editing

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import Browser, Error, Locator, Page, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
expect.set_options(timeout=30_000)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MEASURES = {
    "round-trip": r"\d+(\.\d)? ms",
    "service": r"\d+(\.\d)? ms",
    "batch": r"size \d+ · \d+ tokens?",
    "read": r"\d+ tokens? · \d+ windows?",
    "model": r"[^@]+@\S+( · \S+)?",
}


class Locked(NamedTuple):
    url: str
    key: str


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def locked(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """A service that answers requests with a key only."""
    key, keys = make_key(), tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(record("visitor", key))
    with serving(tiny_bundle, "--api-keys", keys) as server:
        yield Locked(server.url, key)


@pytest.fixture
def page(browser: Browser, server_url: str) -> Iterator[Page]:
    """The playground, its models loaded."""
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(server_url)
    expect(page.locator("#model")).to_be_enabled()
    yield page
    context.close()


def run(page: Page, box: str, **fields: str) -> Any:
    """Fills fields of a box, runs it, and returns the service's JSON answer once it is shown."""
    for name, text in fields.items():
        page.fill(f"#{box} [name={name}]", text)
    with page.expect_response(lambda response: response.request.method == "POST") as caught:
        page.click(f"#{box} .run")
    expect(page.locator(f"#{box} .results:not([aria-busy])")).to_be_visible()
    return caught.value.json()


def answer_with(page: Page, path: str, **reply: Any) -> None:
    page.route(f"**/{path}", lambda route: route.fulfill(**reply))


def texts(page: Page | Locator, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


def watch(page: Page) -> tuple[list[str], list[str]]:
    """Return lists of what the page requests from now on, and of its complaints."""
    requested: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return requested, complaints


def test_page_loads_alone_and_in_silence(browser, server_url):
    """Loading the pages asks no other origin for anything and logs no error or violation."""
    page = browser.new_page()
    requested, complaints = watch(page)
    page.goto(server_url)
    expect(page.locator("#model")).to_be_enabled()
    run(page, "classify")
    page.goto(f"{server_url}/docs")
    expect(page.locator("#swagger-ui .opblock").first).to_be_visible()
    page.close()
    origins = {urlsplit(url)[:2] for url in requested}
    assert (origins, complaints) == ({urlsplit(server_url)[:2]}, [])


def test_attention_is_drawn(browser, masked_url):
    """The lines of a token show its weights, on a narrow dark page without faults that axe finds."""
    folder = resources.files(pytest.importorskip("axe_core_python", reason="it is not installed"))
    page = browser.new_page(color_scheme="dark", viewport={"width": 390, "height": 900})
    page.goto(masked_url)
    expect(page.locator("#model")).to_be_enabled()
    weights = run(page, "attention", inputs="the ferry was late")["results"][0]["weights"]
    page.select_option("#attention .results select", index=3)
    page.locator("#attention .attention ol").first.locator("button").nth(1).press("Enter")
    drawn = [float(one.get_attribute("opacity")) for one in page.locator("#attention line").all()]
    assert pytest.approx(drawn) == [own**0.7 for own in weights[2][1] if own >= 0.01]
    heights = [
        page.locator(f"#attention .attention {of}").first.bounding_box()["height"]
        for of in ("ol", "svg")
    ]
    assert heights[0] == pytest.approx(heights[1], abs=1)
    expect(page.locator("#attention .results .summary")).to_contain_text("attends most to")
    page.evaluate(folder.joinpath("axe.min.js").read_text())
    found = page.evaluate("axe.run('#attention')")["violations"]
    assert [] == [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    with page.expect_response("**/attention") as caught:
        page.select_option("#attention [name=layer]", "2")
    assert weights != caught.value.json()["results"][0]["weights"]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/live"])
def test_axe_finds_nothing(browser, server_url, path, scheme, width):
    """The pages are accessible with results, errors, code and the model card open, and no wider than the window."""
    folder = resources.files(pytest.importorskip("axe_core_python", reason="it is not installed"))
    size = {"width": width, "height": 900}
    page = browser.new_page(color_scheme=scheme, viewport=size, reduced_motion="reduce")
    page.goto(f"{server_url}{path}")
    if path == "/":
        expect(page.locator("#model")).to_be_enabled()
        for box in ("classify", "entities", "answers", "similarity", "analyze", "tokenize"):
            run(page, box)
        page.fill("#rerank-query", "")
        page.click("#rerank .run")
        for details in ("#card", "#classify .code", "#answers .code"):
            page.click(f"{details} > summary")
    else:
        expect(page.locator("#status")).to_contain_text("Connected.")
        assert page.request.post(f"{server_url}/embed", data={"inputs": ["a", "b b"]}).ok
        expect(page.locator(".batch").first).to_be_visible()
    page.evaluate(folder.joinpath("axe.min.js").read_text())
    found = page.evaluate("axe.run()")["violations"]
    assert [] == [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]
    assert width == page.evaluate("document.documentElement.scrollWidth")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_documentation_page_follows_dark_mode(browser, server_url, scheme):
    """Swagger UI has the colors that the browser prefers, and no padlock without keys."""
    page = browser.new_page(color_scheme=scheme)
    page.goto(f"{server_url}/docs")
    expect(page.locator(".opblock-summary-description").first).to_contain_text("Labels and")
    assert (scheme == "dark") == page.evaluate(
        "() => getComputedStyle(document.documentElement).backgroundColor !== 'rgba(0, 0, 0, 0)'"
    )
    assert 0 == page.locator(".authorization__btn, .authorize").count()
    page.close()


@pytest.mark.parametrize("prefix", ["", "/models/one"])
def test_documentation_page_sends_a_request(browser, server_url, prefix):
    """`Try it out` calls a route and shows the response, also behind a path prefix, and calls no other server."""
    page = browser.new_page()
    requested, complaints = watch(page)

    def forward(route):
        path = urlsplit(route.request.url).path.removeprefix(prefix)
        route.fulfill(response=route.fetch(url=server_url + path))

    if prefix:
        page.route(f"**{prefix}/**", forward)
    page.goto(f"{server_url}{prefix}/docs")
    classify = page.locator(".opblock", has=page.locator("[data-path='/classify']"))
    classify.locator(".opblock-summary-control").click()
    classify.locator(".try-out__btn").click()
    classify.locator("textarea").first.fill('{"inputs": "A warm and generous film."}')
    with page.expect_response(f"{server_url}{prefix}/classify") as caught:
        classify.locator(".execute").click()
    shown = classify.locator(".live-responses-table")
    expect(shown.locator(".response-col_status").last).to_contain_text("200")
    for label in caught.value.json()["results"][0]:
        expect(shown).to_contain_text(label["label"])
    page.close()

    origins = {urlsplit(url)[:2] for url in requested if not url.startswith("data:")}
    assert (origins, complaints) == ({urlsplit(server_url)[:2]}, [])


def test_classify_draws_a_bar_for_every_label(page):
    """Each label of the answer has a row whose bar is as long as its score, best first."""
    labels = run(page, "classify", inputs="A warm and generous film.")["results"][0]
    widths = page.locator("#classify .bar-fill").evaluate_all(
        "bars => bars.map(bar => parseFloat(bar.style.width))"
    )
    assert texts(page, "#classify .bar-label") == [label["label"] for label in labels]
    assert widths == pytest.approx([100 * label["score"] for label in labels], abs=0.01)


@pytest.mark.parametrize("box", ["classify", "entities", "answers", "similarity"])
def test_measures_follow_each_call(page, box):
    """Latency, the service's share, the batch, the tokens read and the model are shown."""
    run(page, box)
    shown = page.locator(f"#{box} .facts > div").evaluate_all(
        "facts => facts.map(fact => [fact.dataset.fact, fact.querySelector('dd').textContent])"
    )
    unlike = [name for name, text in shown if not re.fullmatch(MEASURES[name], text)]
    assert ([name for name, _ in shown], unlike) == (list(MEASURES), [])


def test_entities_are_marked_within_the_text(page):
    """The whole text is shown, and the marks hold exactly the spans that the service named, also after emoji."""
    text = "🚀👨‍👩‍👧 Angela Merkel 🎉 met the board of Siemens in Berlin."
    entities = run(page, "entities", inputs=text)["results"][0]
    page.eval_on_selector_all("#entities .entity-tag", "tags => tags.forEach(tag => tag.remove())")
    spans = [text[entity["start"] : entity["end"]] for entity in entities]
    assert spans
    assert texts(page, "#entities .entity-text") == spans
    assert texts(page, "#entities .prose") == [text]


def test_entities_of_typed_labels(browser, server_url):
    """Labels, threshold and nesting are sent; an entity is marked within another, and one that overlaps is not."""
    text = "🚀 Bank of Rome in Rome"
    spans = {"bank": (2, 14), "city": (10, 14), "place": (10, 22), "other city": (18, 22)}
    entities = [
        {"entity_group": label, "score": 0.8, "word": text[start:end], "start": start, "end": end}
        for label, (start, end) in reversed(spans.items())
    ]
    page = browser.new_page()
    heads = {"entities": {"task": "zero-shot-ner"}}
    answer_with(page, "models", json={"models": [{"id": "labels@1", "heads": heads}]})
    answer_with(page, "ner", json={"model": "labels@1", "head": "entities", "results": [entities]})
    page.goto(server_url)
    page.select_option("#labelled [name=threshold]", "0.3")
    page.check("#labelled [name=nested]")
    with page.expect_request("**/ner") as caught:
        run(page, "labelled", inputs=text, labels="bank\ncity\n\nplace")
    fields = {"labels": ["bank", "city", "place"], "threshold": 0.3, "nested": True}
    assert {"inputs": text, "model": "labels@1", **fields} == caught.value.post_data_json
    page.eval_on_selector_all(".entity-tag", "tags => tags.forEach(tag => tag.remove())")
    assert ["Bank of Rome", "Rome", "Rome"] == texts(page, "#labelled .entity-text")
    assert ["Rome"] == texts(page, "#labelled .entity .entity .entity-text")
    assert [text] == texts(page, "#labelled .prose")
    page.close()


def test_best_answer_is_marked_in_the_context(page):
    """Answers are listed best first, the first is marked in its context."""
    context = "🌊 The harbour was dug in 1850. The lighthouse was built in 1861 by Ines Valdor."
    question = "When was the lighthouse built?"
    answers = run(page, "answers", question=question, context=context)["results"][0]
    assert texts(page, "#answers .choice .bar-label") == [answer["answer"] for answer in answers]
    assert texts(page, "#answers .prose") == [context]
    assert texts(page, "#answers mark.answer") == [answers[0]["answer"]]


def test_choosing_another_answer_moves_the_mark(page):
    """Answers may overlap, so the context marks one at a time: the one that is pressed."""
    answers = run(page, "answers")["results"][0]
    page.locator("#answers .choice").last.click()
    pressed = page.locator("#answers .choice[aria-pressed=true] .bar-label")
    assert pressed.all_text_contents() == [answers[-1]["answer"]]
    assert texts(page, "#answers mark.answer") == [answers[-1]["answer"]]


@pytest.fixture(scope="module")
def masked_url(masked_bundle: Path, tiny_bundle: Path) -> Iterator[str]:
    """A service with a model that has a fill-mask head, and with one that has none."""
    with serving(masked_bundle, tiny_bundle) as server:
        yield server.url


def test_masks_are_filled_in(browser, masked_url):
    """Each mask token has a bar for each of its tokens; a single one has the text with the best token, too.

    The box is hidden while a model without a fill-mask head is selected.
    """
    page = browser.new_page()
    page.goto(masked_url)
    expect(page.locator("#masks")).to_be_visible()
    page.select_option("#model", "tiny@1")
    expect(page.locator("#masks")).to_be_hidden()
    page.select_option("#model", "masked@1")
    (one,) = run(page, "masks", inputs="The ferry to the [MASK] was late.")["results"]
    assert [token["token_str"] for token in one] == texts(page, "#masks .bar-label")
    assert [one[0]["sequence"]] == texts(page, "#masks .prose")
    (two,) = run(page, "masks", inputs="[MASK] sold a [MASK].")["results"]
    found = [token["token_str"] for tokens in two for token in tokens]
    assert found == texts(page, "#masks .bar-label")
    assert ["Mask 1", "Mask 2"] == texts(page, "#masks .summary")
    page.close()


def test_weights_are_sorted(browser, tasks_bundle):
    """The largest weights of a text's tokens have a bar each; heads of all vectors can rank documents."""
    page = browser.new_page()
    with serving(tasks_bundle) as server:
        page.goto(server.url)
        expect(page.locator("#weights")).to_be_visible()
        (found,) = run(page, "weights", inputs="Ada sold every river.")["embeddings"]
        order = sorted(range(12), key=lambda place: -found["values"][place])
        assert [found["tokens"][place] for place in order] == texts(page, "#weights .bar-label")
        (analysis,) = run(page, "analyze", inputs="Ada sold every river.")["results"]
        number = len(analysis["weights"]["indices"])
        assert f"Weights of {number} tokens" in texts(page, "#analyze .summary")
        for head in ("weights", "tokens"):
            page.select_option("#rerank [name=head]", head)
            ranked = run(page, "rerank", query="Who sold it?", documents="Ada sold it.\nAt dawn.")
            assert head == ranked["head"]
            assert 2 == len(ranked["results"])
    page.close()


def test_the_mask_token_is_that_of_the_model(browser, masked_url):
    """Examples are written with the mask token that the service reports, and a text follows a change of it."""
    page = browser.new_page()

    def rename(route):
        body = route.fetch().json()
        body["models"][0]["heads"]["masks"]["mask_token"] = "<mask>"
        route.fulfill(json=body)

    page.route("**/models", rename)
    page.goto(masked_url)
    expect(page.locator("#masks .mask-token")).to_have_text("<mask>")
    assert "<mask>" in page.input_value("#masks [name=inputs]")
    page.click("#masks .example >> nth=1")
    assert 2 == page.input_value("#masks [name=inputs]").count("<mask>")
    page.close()


def test_similarity_ranks_the_others_by_cosine(page):
    """Every sentence but the first has a bar; a copy of the first comes out on top, at one."""
    sentences = ["The sea is calm.", "Bread is baked at dawn.", "The sea is calm."]
    run(page, "similarity", inputs="\n".join(sentences))
    assert texts(page, "#similarity .reference") == sentences[:1]
    assert texts(page, "#similarity .bar-label") == [sentences[2], sentences[1]]
    assert texts(page, "#similarity .bar-score")[0] == "1.000"


def test_rerank_shows_the_documents_in_order(page):
    """The documents stand by falling score, with the head that scored them."""
    expect(page.locator("#zero-shot")).to_be_hidden()  # no head was trained on entailment
    answer = run(page, "rerank", query="Who drew it?", documents="Ada drew a comet.\n\nIt rained.")
    documents = ["Ada drew a comet.", "It rained."]
    assert texts(page, "#rerank .bar-label") == [documents[r["index"]] for r in answer["results"]]
    assert answer["head"] in texts(page, "#rerank [data-fact=model] dd")[0]


def test_analyze_shows_every_head(page):
    """Each head has a part of its own: labels, marked entities, or the size of a vector."""
    answer = run(page, "analyze", inputs="Ada drew a comet in Turin.")
    assert texts(page, "#analyze h3") == answer["heads"]
    (found,) = answer["results"]
    labels = [label["label"] for label in found[answer["heads"][0]]]
    assert texts(page, "#analyze .of-head:first-child .bar-label") == labels


def test_tokens_are_shown(page):
    """Each token of the answer is shown, and how many the model reads."""
    answer = run(page, "tokenize", inputs="Ada drew a comet.")
    (found,) = answer["results"]
    assert texts(page, "#tokenize .token") == [token["token"] for token in found["tokens"]]
    places = [f"{one['start']}–{one['end']}" for one in found["tokens"] if one["sequence"] == 0]
    assert texts(page, "#tokenize .place") == ["special", *places, "special"]
    summary = f"{found['count']} tokens of at most {answer['max_length']}"
    assert texts(page, "#tokenize .summary") == [summary]


def test_tokens_beyond_the_first_window_are_marked(page):
    """They are those that the service cuts off, and each window begins with a heading."""
    answer = run(page, "tokenize", inputs="the sea " * 600)
    (found,) = answer["results"]
    capacity = answer["max_length"] - 2  # without special tokens
    assert found["truncated"]
    assert found["count"] - answer["max_length"] == len(texts(page, "#tokenize .cut"))
    edges = [f"window {n}" for n in range(2, 1 + -(-1200 // capacity))]
    assert edges == texts(page, "#tokenize .edge")
    expect(page.locator("#tokenize .summary")).to_contain_text(f"{len(edges) + 1} windows")


def test_prompts_of_a_head_may_be_chosen(browser, server_url, tiny_bundle, tmp_path):
    """The box offers the prompts of a head that has one with a text, and sends the chosen name."""
    folder = shutil.copytree(tiny_bundle, tmp_path / "prompted")
    with editing(folder / "manifest.json") as manifest:
        head = manifest["heads"]["embeddings"]
        head |= {"prompts": {"query": "find: ", "web": "sea "}, "default_prompt": "web"}
    page = browser.new_page()
    page.goto(server_url)
    expect(page.locator("#model")).to_be_enabled()
    expect(page.locator("#similarity .prompt-choice")).to_be_hidden()
    with serving(folder) as server:
        page.goto(server.url)
        expect(page.locator("#similarity .prompt-choice")).to_be_visible()
        assert ["default: web", "query (“find:”)", "document (no text)", "web (“sea”)"] == texts(
            page, "#similarity [name=prompt_name] option"
        )
        default = run(page, "similarity", inputs="a\nb")["embeddings"]
        chosen = []
        for name in ("web", "query"):
            page.select_option("#similarity [name=prompt_name]", name)
            chosen.append(run(page, "similarity")["embeddings"])
            expect(page.locator("#similarity .command code")).to_contain_text(
                f'"prompt_name":"{name}"'
            )
    page.close()
    assert default == chosen[0] != chosen[1]


def test_an_empty_box_says_so(page):
    """The page names the empty field, marks it and moves to it, without a request."""
    requested, _ = watch(page)
    page.fill("#answers-question", " ")
    page.click("#answers .run")
    shown = "“Question” is empty: write something, or try an example."
    expect(page.locator("#answers .results")).to_have_text(shown)
    expect(page.locator("#answers-question")).to_be_focused()
    expect(page.locator("#answers-question")).to_have_attribute("aria-invalid", "true")
    assert [] == requested


def test_an_error_is_shown_in_place(page):
    """The service's own error is shown in the box, and the field at fault is marked."""
    error = {"code": "too_large", "message": "It is too long.", "param": "inputs[0].question"}
    answer_with(page, "qa", status=413, body=json.dumps({"error": error}))
    run(page, "answers")
    shown = page.locator("#answers .error")
    expect(shown).to_contain_text("It is too long.")
    expect(shown).to_contain_text("413 · too_large · at inputs[0].question")
    expect(page.locator("#answers-question")).to_have_attribute("aria-invalid", "true")


def test_overload_says_when_to_retry(page):
    """`Retry-After` becomes a sentence."""
    error = {"code": "overloaded", "message": "The queue is full.", "param": None}
    body = json.dumps({"error": error})
    answer_with(page, "classify", status=429, headers={"Retry-After": "3"}, body=body)
    run(page, "classify")
    expected = "The queue is full. Try again in 3 seconds."
    expect(page.locator("#classify .error")).to_contain_text(expected)


def test_unreachable_service_is_said_in_place(page):
    """A failed connection is an error like any other."""
    page.route("**/embed", lambda route: route.abort())
    page.click("#similarity .run")
    expect(page.locator("#similarity .error")).to_contain_text("could not be reached")


def test_control_enter_runs_the_box(page):
    """The keyboard is enough."""
    page.locator("#classify-inputs").press("Control+Enter")
    expect(page.locator("#classify .bar-row").first).to_be_visible()


@pytest.mark.parametrize(
    ("language", "program"),
    [("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"]), ("JavaScript", ["node", "-e"])],
)
def test_the_code_is_the_request(page, language, program):
    """Beside an answer is its request in three languages, each of which prints the same answer."""
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed")
    page.click("#answers .example >> nth=2")
    page.fill("#answers-question", 'It\'s "how" old?\\n 🌊')
    answer = run(page, "answers")
    page.click("#answers .code summary")
    page.click(f"#answers .languages >> text={language}")
    page.fill("#answers-question", "Another one?")  # changes the next request only
    code = page.inner_text("#answers .command code")
    if language == "JavaScript":
        code = f"(async () => {{ {code.replace('console.log(', 'console.log(JSON.stringify(')[:-2]})) }})()"
    ran = subprocess.run([*program, code], capture_output=True, text=True, check=True)
    printed = ast.literal_eval(ran.stdout) if language == "Python" else json.loads(ran.stdout)
    del answer["usage"], printed["usage"]
    assert answer == printed


def test_a_link_restores_a_task(browser, page, server_url):
    """The address that a box copies fills the same box in another browser, and sends no text to the service."""
    page.select_option("#classify [name=head]", index=1)
    page.fill("#classify-inputs", "A 🌊 & a #hash = 100 %\nof it")
    link = page.locator("#classify .link").evaluate("link => link.href")
    found = run(page, "classify")
    other = browser.new_page()
    requested, _ = watch(other)
    other.goto(link)
    expect(other.locator("#classify .run")).to_be_focused()
    assert page.input_value("#classify [name=head]") == other.input_value("#classify [name=head]")
    assert not [url for url in requested if "hash" in urlsplit(url).path + urlsplit(url).query]
    assert found["results"] == run(other, "classify")["results"]
    other.goto(f"{server_url}/#task=masks&model=other%401")
    problems = ["The link is for other@1, which is not served here."]
    problems += [f"{other.input_value('#model')} has no head for the task of the link."]
    expect(other.locator("#models-error .notice")).to_have_text(problems)
    other.close()


def test_the_model_has_a_card(page):
    """It lists each head, each data set with its terms, and the devices; a cold model is named as one."""
    model = page.request.get(page.url + "models").json()["models"][0]
    model["state"] = "cold"
    devices = [{"name": f"cpu:{n}", "ready": n == 0, "queue_tokens": 0} for n in range(2)]
    data = {"name": "News", "origin": "javascript:0", "used_for": "topic", "terms": "MIT"}
    model["datasets"] = [{**data, "commercial_use": "yes"}]
    answer_with(page, "models", json={"models": [model], "devices": devices})
    page.reload()
    page.click("#card summary")
    assert [*model["heads"]] == texts(page.locator("#card table").nth(0), "tbody th")
    assert {"cold", "cpu:0, cpu:1 (not ready)"} <= {*texts(page.locator("#card"), "dd")}
    assert [f"{model['id']} (cold)"] == texts(page.locator("#model"), "option")
    assert [["News", "topic", "MIT", "yes"]] == [
        texts(row, "th, td") for row in page.locator("#card table").nth(1).locator("tbody tr").all()
    ]
    assert 0 == page.locator("#card td a, #card th a").count()  # of a web address only


def test_task_without_a_head_is_hidden(browser, server_url):
    """A model offers the tasks of its heads; the page shows no other."""
    heads = {
        "sentiment": {"task": "classification", "labels": ["a", "b"]},
        "topic": {"task": "classification", "labels": ["c", "d"], "demo": True},
    }
    page = browser.new_page()
    answer_with(page, "models", json={"models": [{"id": "labels@1", "heads": heads}]})
    page.goto(server_url)
    expect(page.locator("#classify .run")).to_be_visible()
    expect(page.locator("#entities")).to_be_hidden()
    expect(page.locator("#classify .badge")).to_be_hidden()
    page.select_option("#classify [name=head]", "topic")
    expect(page.locator("#classify .badge")).to_be_visible()
    page.close()


@pytest.mark.parametrize(
    ("use", "by_head", "shown"),
    [
        ("yes", {"a": "yes", "b": "yes"}, "Commercial use, by its data’s terms: yes"),
        ("no: A: a part; B", {}, "Commercial use, by its data’s terms: no (A: a part; B)"),
        ("no: A", {"a": "no: A", "b": "yes"}, "Commercial use, by its data’s terms: no (A); by head: a no, b yes"),
    ],
)  # fmt: skip
def test_terms_of_the_data_are_shown(browser, server_url, use, by_head, shown):
    """Whether the data of the model that is asked may be used commercially, and if not, which may not."""
    page = browser.new_page()
    terms = {"commercial_use": use, "commercial_use_by_head": by_head}
    others = [{"id": "b@1", **terms}, {"id": "c@1"}]
    answer_with(page, "models", json={"models": [{"id": "a@1"}, *others]})
    page.goto(server_url)
    expect(page.locator("#model")).to_be_enabled()
    page.select_option("#model", "b@1")
    expect(page.locator("#model-terms")).to_have_text(shown)
    page.select_option("#model", "c@1")
    expect(page.locator("#model-terms")).to_be_empty()
    page.close()


def test_a_service_with_keys_asks_for_one(browser, locked):
    """The page takes a key, sends it with every call, and shows it in no command."""
    page = browser.new_page()
    page.goto(locked.url)
    expect(page.locator("#models-error")).to_contain_text("requires an API key")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(locked.key)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_be_enabled()
    expect(page.locator("#models-error")).to_be_empty()
    assert "results" in run(page, "classify")
    command = page.locator("#classify .command code").text_content()
    assert '-H "Authorization: Bearer $QUARTET_API_KEY"' in command
    assert locked.key not in page.content()
    page.close()


def test_a_key_is_kept_for_the_tab_alone(browser, locked):
    """A reload needs no key again; another tab does."""
    context = browser.new_context()
    page, other = context.new_page(), context.new_page()
    page.goto(locked.url)
    page.fill("#key", f" {locked.key}\t")
    page.click("#key-form button")
    expect(page.locator("#model")).to_be_enabled()
    page.reload()
    expect(page.locator("#model")).to_be_enabled()
    other.goto(locked.url)
    expect(other.locator("#key")).to_be_visible()
    expect(other.locator("#model")).to_be_disabled()
    context.close()


def test_a_wrong_key_is_said_in_place(browser, locked):
    """The page shows the service's error, and accepts another key."""
    page = browser.new_page()
    page.goto(locked.url)
    page.fill("#key", "guessed")
    page.click("#key-form button")
    expect(page.locator("#models-error .error")).to_contain_text("the key is unknown")
    page.fill("#key", locked.key)
    page.click("#key-form button")
    expect(page.locator("#model")).to_be_enabled()
    page.close()


def test_a_service_without_keys_asks_for_none(page):
    """The field is there only where it is needed."""
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("nav [href=metrics]")).to_be_visible()


# The headers and the body of OpenAI's JavaScript client.
STAINLESS = ("arch", "lang", "os", "package-version", "retry-count", "runtime", "runtime-version")
ASK = """async ([url, headers]) => {
  const body = {input: ["a", "b"], model: "text-embedding-3-small", encoding_format: "base64"};
  const response = await fetch(url, {method: "POST", headers, body: JSON.stringify(body)});
  return [response.status, response.headers.get("x-quartet-head"), (await response.json()).data.length];
}"""


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[int]:
    """The port of a server of an empty page."""
    (tmp_path / "index.html").write_text("<p>A page.")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


def test_a_page_of_another_origin(browser, pages, tiny_bundle):
    """A page calls the service as OpenAI's JavaScript client does if its origin is listed, and else cannot."""
    headers = {
        "Authorization": "Bearer none",
        "Content-Type": "application/json",
        **{f"x-stainless-{name}": "1" for name in STAINLESS},
    }
    listed, other = f"http://localhost:{pages}", f"http://127.0.0.1:{pages}"
    options = ["--cors-origins", listed, "--unknown-model", "default"]
    with serving(tiny_bundle, *options) as server, browser.new_context() as context:
        page, url = context.new_page(), f"{server.url}/v1/embeddings"
        page.goto(listed)
        assert [200, "embeddings", 2] == page.evaluate(ASK, [url, headers])
        page.goto(other)
        with pytest.raises(Error, match="Failed to fetch"):
            page.evaluate(ASK, [url, headers])


@pytest.fixture(scope="module")
def watchable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A service of two HTTP processes, and keys for its texts and for its metrics."""
    keys = {"visitor": make_key(), "watcher": make_key()}
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    may = {"visitor": "", "watcher": 'may = ["metrics"]\n'}
    file.write_text("".join(record(name, key) + may[name] for name, key in keys.items()))
    bundle = ROOT / "bundles" / "quartet-mini"
    with serving(bundle, "--api-keys", file, "--http-workers", 2) as server:
        yield server, keys


def test_the_live_view_shows_batches(browser, watchable):
    """A page with a key for metrics shows what is computed, whichever process it is from, and no text or tenant."""
    server, keys = watchable
    page = browser.new_page()
    requested, complaints = watch(page)
    page.goto(f"{server.url}/live")
    expect(page.locator("#status")).to_have_text("This service requires an API key.")
    complaints.clear()  # the browser reports the 401
    page.fill("#key", keys["watcher"])
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("Connected.")
    texts_sent = ["a secret", "another secret of more words"]
    for number in range(4):
        bearer = {"Authorization": f"Bearer {keys['visitor']}", "Content-Type": "application/json"}
        body = json.dumps({"inputs": texts_sent[: 1 + number % 2]}).encode()
        assert 200 == server.send("POST", "/embed", body, bearer).status
    expect(page.locator(".batch").first).to_contain_text("embeddings")
    expect(page.locator("#classes tr").first).to_contain_text("interactive")
    expect(page.locator("#classes td").nth(4)).not_to_have_text("0")
    content = page.content()
    assert not [word for word in ("secret", "visitor", *keys.values()) if word in content]
    page.focus("#pause")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("Paused. The service sends nothing.")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("Connected.")
    page.close()
    assert ({urlsplit(server.url)[:2]}, []) == (
        {urlsplit(url)[:2] for url in requested},
        complaints,
    )
