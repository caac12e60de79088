"""The README's commands answer what the README says."""

import subprocess

import pytest

from tests.conftest import ROOT
from tests.e2e.page_examples import examples, rounded, values
from tests.e2e.test_proxies import program

CALLS = [example for example in examples(ROOT / "README.md") if example.shown]

pytestmark = pytest.mark.e2e


def test_readme_shows_every_endpoint():
    """There is one curl for each of the four tasks."""
    begins = [" ".join(call.command.split()[:2]) for call in CALLS]
    assert [f"curl localhost:8000/{task}" for task in ("classify", "ner", "qa", "embed")] == begins


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.command.split()[1])
def test_curl_answers_what_the_readme_shows(mini_url, call):
    """The default bundle gives the README's answer, but for the last digits of its numbers."""
    program("curl")
    command = call.command.replace("localhost:8000", mini_url.removeprefix("http://"))
    answer = subprocess.check_output(["bash", "-c", command], text=True)

    assert rounded(values(call.shown)) == values(answer)
