"""The documentation, held against the code: records, settings, API, examples, paths and links."""

import doctest
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from service import __version__
from service.api import admin, openapi, token_routes
from service.api.native_routes import router
from service.api.schemas import HeadRequest, Request
from service.core import manifest
from service.core.manifest import Manifest, Provenance
from service.errors import QuartetError, kinds
from service.keys import read_keys
from service.settings import Settings, flag
from service.settings_sources import configure
from service.tasks.fields import Strict
from service.variables import NOT_FLAGS, variable
from tests import charts, reference_pages
from tests.words import avoided, find_files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "research").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"`((?:benchmarks|deploy|export|model|research|service|tests)/[\w./-]+\.\w+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
DEFAULTS = {"bundles": "all in `bundles/` but quartet-starter"}


Record = Manifest.__base__


def read(name):
    return (DOCS / name).read_text(encoding="utf-8")


def sections(text):
    """The text under each heading, by the heading without its code marks."""
    parts = HEADING.split(FENCE.sub("", text))
    return {
        title.replace("`", ""): body for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def examples(text, language):
    """The fenced blocks of a language."""
    return [block for name, block in FENCE.findall(text) if name == language]


def rows(text):
    """The cells of the first table's rows, without its head."""
    table = re.search(r"(?:^\|.*\|\n?)+", text, re.MULTILINE)
    lines = table[0].splitlines()[2:] if table else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def described(text):
    """Each field that a table describes, in order, with its presence: "required" or its default."""
    return {row[0].strip("`"): row[2].strip("`") for row in rows(text)}


def presence(record, common=None):
    """The same of a pydantic model's fields, without those of the common base (its first base, if none is given)."""
    inherited = (common or record.__base__).model_fields
    return {
        name: "required" if field.is_required() else shown(field.default)
        for name, field in record.model_fields.items()
        if name not in inherited
    }


def shown(default):
    if isinstance(default, BaseModel):
        default = default.model_dump(exclude_defaults=True)
    return json.dumps(default)


def slugs(page):
    """The anchors that GitHub gives a page's headings."""
    titles = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links():
    """Every link of every page that leads to a place in this repository."""
    for page in PAGES:
        text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
        for target in LINK.findall(text):
            if not re.match(r"[a-z]+:", target):
                yield pytest.param(page, target, id=f"{page.relative_to(ROOT)}->{target}")


RECORDS = {
    name: found
    for name, found in vars(manifest).items()
    if isinstance(found, type) and issubclass(found, Record) and found is not Record
}
REQUESTS = {f"POST {path}": schema for path, schema in openapi.REQUESTS.items()}


@pytest.mark.parametrize("name", RECORDS)
def test_bundle_page_describes_every_field(name):
    """Each record of the manifest has a table of exactly its fields, with what they default to."""
    assert presence(RECORDS[name]) == described(sections(read("reference/bundle.md"))[name])


def test_example_manifest_is_one():
    """The example in the bundle's specification is a valid manifest."""
    [example] = examples(read("reference/bundle.md"), "json")

    assert "reviews@3" == Manifest.model_validate_json(example).id


def settings_table():
    """The table in docs/reference/settings.md, as it should be."""
    lines = ["| setting | flag | variable | default | what it is, and when to change it |"]
    lines.append("|---|---|---|---|---|")
    for name, field in Settings.model_fields.items():
        option = "(arguments)" if name == "bundles" else f"`{flag(name)}`"
        option = "(none)" if name in NOT_FLAGS else option
        default = "unset" if field.default in (None, (), {}) else f"`{str(field.default).lower()}`"
        default = DEFAULTS.get(name, default)
        lines.append(
            f"| `{name}` | {option} | `{variable(name)}` | {default} | {field.description} |"
        )
    return "\n".join(lines)


def test_settings_page_is_current():
    """The table of settings says what the settings say of themselves."""
    table = settings_table()

    assert table in read("reference/settings.md"), (
        f"docs/reference/settings.md should hold this table:\n\n{table}\n"
    )


@pytest.mark.parametrize("heading", REQUESTS)
def test_api_page_describes_every_field(heading):
    """Each endpoint has a table of exactly its request's fields, with what they default to."""
    request = REQUESTS[heading]
    common = HeadRequest if issubclass(request, HeadRequest) else Request

    assert presence(request, common) == described(sections(read("reference/api.md"))[heading])


def test_api_page_describes_the_fields_of_every_request():
    """Their table has the fields of a request to a model and of a request to a head."""
    assert presence(HeadRequest, Strict) == described(
        sections(read("reference/api.md"))["Every request"]
    )


@pytest.mark.parametrize("name", reference_pages.TABLES)
def test_generated_tables_are_current(name):
    """Errors and metrics are those of the code: `python -m tests.reference_pages` renews the tables."""
    assert reference_pages.TABLES[name]() in read(f"reference/{name}.md")


def test_every_error_has_advice():
    """The page of errors describes each code of the error tree, and no other."""
    assert {kind.code for kind in (QuartetError, *kinds())} == reference_pages.ADVICE.keys()


def test_api_page_names_every_route_and_header():
    """The page describes every route, and every header of requests and responses."""
    headers = [header["name"] for header in openapi.REQUEST_HEADERS] + [*openapi.RESPONSE_HEADERS]
    paths = [
        route.path for route in (*router.routes, *token_routes.router.routes, *admin.router.routes)
    ]

    assert [] == [name for name in headers + paths if name not in read("reference/api.md")]


def test_worked_example_is_right():
    """The arrays shown in the architecture are those that the code gives."""
    found = doctest.testfile(str(DOCS / "explanation" / "architecture.md"), module_relative=False)

    assert (0, True) == (found.failed, found.attempted > 0)


def test_training_examples_are_settings(tmp_path):
    """The settings and the provenance that are shown are read as they stand."""
    from export.provenance import read_metadata
    from model.data.head_rows import is_graded
    from model.distill import DistillSettings as Distilling
    from model.finetune import FinetuneSettings as Finetuning

    *settings, provenance = examples(read("how-to/training.md"), "toml")
    single, joint, graded, half, general, named = map(tomllib.loads, settings)
    (tmp_path / "told.toml").write_text(provenance)
    told = read_metadata(tmp_path / "told.toml")

    assert ["sentiment"] == [*Finetuning(**single).heads]
    assert ["sentiment", "entities"] == [*Finetuning(**joint).heads]
    assert is_graded(Finetuning(**graded).heads["relevance"])
    assert ["labels", "logits", "relations"] == [*Distilling(**half).losses]
    assert "mini" == Distilling(**general).preset
    assert Finetuning(**named).heads["stars"].train == ["reviews.csv?text=Review text&label=Stars"]
    datasets = Provenance.model_validate(told["provenance"]).datasets
    assert ["SST-2", "shop reviews 2026"] == [data_set.name for data_set in datasets]


def test_examples_of_settings_are_some(tmp_path):
    """The file of settings and the file of keys that are shown are read as they stand."""
    settings, keys = examples(read("reference/settings.md"), "toml")
    (tmp_path / "keys.toml").write_text(keys)
    (tmp_path / "quartet.toml").write_text(settings)

    assert ["search"] == [*read_keys(tmp_path / "keys.toml")]
    assert 2 == configure({"config": tmp_path / "quartet.toml"}).settings.http_workers


def test_pages_show_the_configurations_that_are_shipped():
    """The configurations of proxies on the pages are those that the tests run, word for word."""
    shipped = {path.name: path.read_text() for path in (ROOT / "deploy" / "proxies").iterdir()}
    pages = read("how-to/proxies.md") + read("how-to/cutover.md")
    shown = [block for _, block in FENCE.findall(pages)]

    assert {"nginx.conf", "nginx-cutover.conf", "haproxy.cfg", "envoy.yaml"} == shipped.keys()
    assert sorted(shipped.values()) == sorted(shown)


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_links_lead_somewhere(page, target):
    """A relative link leads to a file of this repository, and to a heading that it has."""
    path, _, fragment = target.partition("#")
    file = (page.parent / path).resolve() if path else page

    assert file.is_relative_to(ROOT)
    assert file.exists()
    assert not fragment or fragment in slugs(file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    """A page that names a file of ours names one that is there."""
    named = CODE.findall(page.read_text(encoding="utf-8"))

    assert [] == [name for name in named if not (ROOT / name).exists()]


def test_pages_install_from_a_checkout():
    """No package index has Quartet, so an installation of it names a checkout or a wheel."""
    page = "".join(path.read_text(encoding="utf-8") for path in PAGES)

    assert [] == re.findall(r"pip install .*quartet-serving.*", page)


def promised():
    """What tests prove, by file and test: read off the marks."""
    mark = re.compile(
        r'^@pytest\.mark\.promise\(\s*"([^"]+)"\s*\)\n(?:(?!def ).*\n)*?def (\w+)', re.MULTILINE
    )
    return {
        (path.name, name): text
        for path in (ROOT / "tests" / "e2e").glob("test_*.py")
        for text, name in mark.findall(path.read_text(encoding="utf-8"))
    }


def test_every_promise_has_its_proof():
    """Each row names the test that proves it, and each such test has its row."""
    proof = re.compile(r"`(test_\w+\.py)`: `(test_\w+)`")
    told = {proof.search(row[2]).groups(): row[0] for row in rows(read("reference/promises.md"))}
    assert told == promised()
    assert len(told) > 20


def test_the_chart_knows_every_setting():
    """`python -m tests.charts` renews their names."""
    schema = (charts.CHART / "values.schema.json").read_text(encoding="utf-8")
    assert charts.renew_settings(schema) == schema


def test_python_example_runs(monkeypatch, capsys):
    """The example of the Python API prints what the page states."""
    monkeypatch.chdir(ROOT)
    (example,) = examples(read("reference/python_api.md"), "python")

    exec(compile(example, "python_api.md", "exec"), {})

    assert f"It prints `{capsys.readouterr().out.strip()}`." in read("reference/python_api.md")


@pytest.mark.slow
def test_the_programs_that_contain_the_service_run():
    """Each program of the page prints what the page says."""
    page = read("how-to/embed.md")
    for example in examples(page, "python"):
        command = [sys.executable, "-c", example]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        first, second = run.stdout.splitlines()
        assert f"It prints `{first}`, then `{second}`." in page


def test_every_decision_is_listed():
    """The list of decisions has each page with its title."""
    folder = DOCS / "explanation" / "decisions"
    pages = {
        path.name: HEADING.findall(path.read_text("utf-8"))[0] for path in folder.glob("0*.md")
    }

    listed = re.findall(
        r"^- \[(.+)\]\((.+)\)$", (folder / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted((title, name) for name, title in pages.items()) == sorted(listed)


ENTRY = re.compile(r"^- (.*(?:\n  .*)*)", re.MULTILINE)
RELEASE = re.compile(r"^## \[(?:Unreleased\]|\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d)$")


def test_changelog_has_dated_versions():
    """The newest version is the package's; a version has a date and only Added, Changed, Fixed and the like."""
    headings = re.findall(r"^##+ .*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    releases = [line for line in headings if line.startswith("## ")]
    kinds = {line for line in headings if line.startswith("### ")}

    assert [] == [line for line in releases if not RELEASE.match(line)]
    versions = [line for line in releases if "Unreleased" not in line]
    assert versions[0].startswith(f"## [{__version__}] - ")
    assert kinds <= {
        "### Added",
        "### Changed",
        "### Deprecated",
        "### Removed",
        "### Fixed",
        "### Security",
    }


def test_changelog_entries_are_short():
    """An entry names the feature first, then a colon, and has at most 25 words."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = [" ".join(entry.split()) for entry in ENTRY.findall(text)]

    assert len(entries) > 50
    assert [] == [entry for entry in entries if len(entry.split()) > 25]
    assert [] == [entry for entry in entries if not re.match(r"[^:]{2,60}: .+[^.]\.$", entry)]


FOLDERS = (
    "benchmarks",
    "bundles",
    "deploy",
    "docs",
    "export",
    "model",
    "service",
    "tests",
    ".github",
)
MOST = 0.5  # phrasings to avoid in 1,000 words


@pytest.mark.parametrize("folder", [*FOLDERS, ":(glob)*"])
def test_words_are_plain(folder):
    """Prose, comments, docstrings and messages have few phrasings to avoid: `python -m tests.words` lists them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a Git checkout, so the project's own files are not known")
    counts = [avoided(path) for path in find_files(folder)]
    words = sum(count for count, _ in counts)
    found = [line for _, lines in counts for line in lines]

    assert words > 0
    assert 1000 * len(found) / words <= MOST, "\n".join(line for _, line in found[:50])


def test_phrasings_to_avoid_are_found(tmp_path):
    """Comments, docstrings and messages are searched, but not names and short strings."""
    page, code = tmp_path / "page.md", tmp_path / "code.py"
    page.write_text("Nobody waits.\n\nA client waits.\n")
    code.write_text(
        '"""Tell who asks."""\n# beside it\nwho = "whom"\nfail("it is told of a fault")\n'
    )

    assert (5, [1]) == (avoided(page)[0], [number for number, _ in avoided(page)[1]])
    assert [2, 1, 4] == [number for number, _ in avoided(code)[1]]
