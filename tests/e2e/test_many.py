"""Many texts in one request: the stream has each result as soon as it is ready, and other requests are not delayed."""

import http.client
import json
import threading
import time

import pytest

from tests import samples

pytestmark = pytest.mark.e2e

MANY = 1000


@pytest.mark.promise("A request with a thousand texts does not delay other requests.")
def test_a_thousand_texts_hold_up_nobody(tiny, tiny_bundle):
    """A single text that comes behind a thousand is answered before they are, and each gets its own answer."""
    texts = [samples.text(60 + number % 40, seed=number) for number in range(MANY)]
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60)
    headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
    connection.request("POST", "/embed", json.dumps({"inputs": texts}), headers)
    answer = connection.getresponse()
    lines = [json.loads(answer.readline())]
    ended = []

    def read():
        lines.extend(json.loads(text) for text in answer)
        ended.append(time.monotonic())

    reading = threading.Thread(target=read)
    reading.start()
    alone = tiny.answer("/embed", {"inputs": texts[7]})
    answered = time.monotonic()
    reading.join(60)
    assert answered < ended[0]
    *results, summary = lines
    assert [*range(MANY)] == sorted(result["index"] for result in results)
    assert summary["usage"]["windows"] == MANY
    by_index = {result["index"]: result["embedding"] for result in results}
    assert by_index[7] == pytest.approx(alone["embeddings"][0], abs=1e-5)
    connection.close()
