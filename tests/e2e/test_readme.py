"""The README's commands answer what the README says."""

import json
import re
import urllib.request
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
CALL = re.compile(
    r"```bash\ncurl localhost:8000(/\w+)[^\n]*\\\n\s+-d '(.*?)'\n```\s+```json\n(.*?)\n```", re.S
)
CALLS = CALL.findall(README.read_text(encoding="utf-8"))

pytestmark = pytest.mark.e2e


def test_readme_shows_every_endpoint():
    """There is one curl for each of the four tasks."""
    assert [path for path, _, _ in CALLS] == ["/classify", "/ner", "/qa", "/embed"]


@pytest.mark.parametrize(("path", "body", "shown"), CALLS, ids=[call[0] for call in CALLS])
def test_curl_answers_what_the_readme_shows(mini_url, path, body, shown):
    """The default bundle gives the README's answer, but for the last digits of its numbers."""
    request = urllib.request.Request(
        mini_url + path, body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)

    assert rounded(json.loads(shown)) == rounded(answer)


def rounded(value):
    """int8 rounds a little differently from one kind of processor to another."""
    if isinstance(value, float):
        return pytest.approx(value, abs=0.02)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value
