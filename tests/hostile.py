"""Request bodies that mean no good, drawn from a seed: torn, nested, mistyped, endless, and merely strange."""

import gzip
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

JSON = {"Content-Type": "application/json"}
TEN_MB = 10 * 1024 * 1024

GOOD: dict[str, Any] = {
    "/classify": {"inputs": ["Ada drew a comet.", "é"], "text_pair": ["b", "c"], "top_k": 1},
    "/ner": {"inputs": "Ada met Emmy.", "aggregation_strategy": "simple", "stride": 8},
    "/qa": {"inputs": [{"question": "Who?", "context": "Ada did."}], "top_k": 2},
    "/embed": {"inputs": ["a", "b"], "dimensions": 8, "encoding_format": "base64"},
}
FIELDS = {
    "/classify": ["inputs", "text_pair", "top_k", "truncate", "model", "head", "stride"],
    "/ner": ["inputs", "aggregation_strategy", "truncate", "stride"],
    "/qa": ["inputs", "question", "context", "top_k", "handle_impossible_answer", "truncate"],
    "/embed": ["inputs", "normalize", "dimensions", "encoding_format", "truncate", "stride"],
}
VALUES = [
    *(None, True, False, 0, -1, 1.5, 2**63, "", "window", "\0", "x" * 300),
    *([], {}, [[]], [None], ["a", 1], [{}], {"question": 1}, [["a"]], {"inputs": "a"}),
]
NUMBERS = [
    *("1e999", "-1e999", "1e400000", "NaN", "Infinity", "-Infinity", "-0", "0.0", "1.0", "01"),
    *("+1", "0x10", "1_000", ".5", "5.", "1e", "--1", "9" * 20, "9" * 400, "-" + "9" * 30),
    *("1" + "0" * 5000, "0." + "3" * 5000, "1E+2", "2e0", "٣", "１"),  # noqa: RUF001
]
STRINGS = [
    *(r"\ud800", r"\udc00", r"\udfff\ud800", r"a\ud83d", r"\ud83d\ude00", r"\u0000", r"a\u0000b"),
    *(r"\u00", r"\uD8", r"\x41", "\\", r"\q", "\n", "\t", "\x00", "\x1f", r"\/", r"\u002e"),
]
NOT_UTF8 = [
    *(b"\x80", b"\xbf", b"\xc0\xaf", b"\xc1\xbf", b"\xe0\x80\xaf", b"\xf0\x80\x80\xaf", b"\xc3"),
    *(b"\xe4\xb8", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf4\x90\x80\x80", b"\xff"),
    *(b"\xfe\xff", b"\xf8\x88\x80\x80\x80", b"\xef\xbf", b"\xc3("),
]
STRANGE_TEXTS = [
    *("\u0301" * 100_000, "e" + "\u0301" * 50_000, "a" * 100_000, "\u202e" * 1000 + "abc"),
    *("\u05e9\u05dc\u05d5\u05dd " * 2000, "\U0001f468\u200d" * 20_000, "\U0001f1e6" * 10_000),
    *("\ufeffa", "\ufffe\uffff", "\U0010ffff" * 1000, "\u0085\u2028\u2029" * 1000, "\0" * 10_000),
    *(" " * 100_000, "\u3000" * 10_000, "\u4e2d" * 20_000, "." * 50_000, "\ufdfa" * 2000),
    *("[SEP]" * 1000, "[CLS] a [MASK] b [PAD]", "\u1100\u1161" * 5000, "\ud7a3" * 5000),
]


@dataclass(frozen=True)
class Case:
    """One request; what it is called says what is wrong with it."""

    name: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: JSON)


def cases(seed: int) -> list[Case]:
    """More than a thousand, the same for a seed."""
    rng = random.Random(seed)
    return [
        *torn(),
        *flipped(rng),
        *nested(),
        *mistyped(),
        *numbers(),
        *strings(),
        *strange(),
        *endless(),
        *compressed(rng),
        *mislabelled(),
        *noise(rng),
        *made_up(rng),
    ]


def good(path: str) -> bytes:
    return json.dumps(GOOD[path], ensure_ascii=False).encode()


def torn() -> Iterator[Case]:
    """Every beginning of a good body, and every end."""
    for path in GOOD:
        body = good(path)
        for place in range(len(body)):
            yield Case(f"ends at {place}", path, body[:place])
        for place in range(1, len(body), 5):
            yield Case(f"begins at {place}", path, body[place:])


def flipped(rng: random.Random) -> Iterator[Case]:
    for index in range(120):
        path = rng.choice([*GOOD])
        body = bytearray(good(path))
        for _ in range(rng.choice((1, 1, 3))):
            body[rng.randrange(len(body))] = rng.randrange(256)
        yield Case(f"flipped {index}", path, bytes(body))


def nested() -> Iterator[Case]:
    for depth in (3, 1000, 1025, 100_000, 3_000_000):
        for name, opening, closing in (("lists", b"[", b"]"), ("objects", b'{"a":', b"}")):
            yield Case(f"{depth} {name}", "/embed", opening * depth + b"1" + closing * depth)
            yield Case(f"{depth} open {name}", "/ner", b'{"inputs": ' + opening * depth)


def mistyped() -> Iterator[Case]:
    for path, fields in FIELDS.items():
        for name in fields:
            for value in VALUES:
                body = json.dumps(GOOD[path] | {name: value}).encode()
                yield Case(f"{name}: {str(value)[:20]!r}", path, body)
    for value in VALUES:
        yield Case(f"body: {str(value)[:20]!r}", "/classify", json.dumps(value).encode())


def numbers() -> Iterator[Case]:
    for number in NUMBERS:
        for path, name in (("/classify", "top_k"), ("/embed", "dimensions"), ("/ner", "inputs")):
            body = b'{"inputs": "a", "%s": %s}' % (name.encode(), number.encode())
            yield Case(f"{name}: {number[:20]}", path, body)


def strings() -> Iterator[Case]:
    for text in STRINGS:
        yield Case(f"text {text!r}", "/embed", b'{"inputs": "%s"}' % text.encode())
        yield Case(f"field {text!r}", "/embed", b'{"inputs": "a", "%s": 1}' % text.encode())
    for data in NOT_UTF8:
        yield Case(f"text {data!r}", "/ner", b'{"inputs": "a%sb"}' % data)
        yield Case(f"field {data!r}", "/ner", b'{"inputs": "a", "%s": 1}' % data)
        yield Case(f"around {data!r}", "/ner", data + good("/ner") + data)
    for encoding in ("utf-16", "utf-32-le", "utf-8-sig", "latin-1", "utf-7"):
        yield Case(f"in {encoding}", "/classify", good("/classify").decode().encode(encoding))


def strange() -> Iterator[Case]:
    """Bodies with nothing wrong but what people seldom write."""
    for index, text in enumerate(STRANGE_TEXTS):
        for path in ("/classify", "/ner", "/embed"):
            body = json.dumps({"inputs": [text, "a"], "truncate": True})
            yield Case(f"text {index}", path, body.encode())
        body = json.dumps({"question": "who? " + text[:200], "context": "b" + text[:5000]})
        yield Case(f"text {index}", "/qa", body.encode())


def endless() -> Iterator[Case]:
    def fill(head: bytes, part: bytes, tail: bytes) -> bytes:
        return head + part * ((TEN_MB - len(head) - len(tail)) // len(part)) + tail

    names = b"".join(b'"%x":0,' % number for number in range(800_000))
    yield Case("10 MB of lists", "/embed", fill(b'{"inputs":[', b"[],", b"1]}"))
    yield Case("10 MB of numbers", "/embed", fill(b"[", b"0,", b"1]"))
    yield Case("10 MB of texts", "/embed", fill(b'{"inputs":[', b'"",', b'""]}'))
    yield Case("10 MB of fields", "/embed", b'{%s"inputs":"a"}' % names)
    yield Case("10 MB of one text", "/ner", fill(b'{"inputs":"', b"a b, ", b'"}'))
    yield Case("10 MB of one name", "/ner", fill(b'{"', b"n", b'":1}'))
    yield Case("10 MB of one model", "/ner", fill(b'{"inputs":"a","model":"', b"m", b'"}'))
    yield Case("10 MB of one number", "/ner", fill(b'{"inputs":"a","top_k":', b"9", b"}"))
    yield Case("10 MB of escapes", "/ner", fill(b'{"inputs":"', b'\\\\\\"', b'"}'))
    yield Case("10 MB of nothing", "/classify", fill(b"{", b" ", b"}"))
    yield Case("10 MB of zeros", "/classify", b"\0" * TEN_MB)
    yield Case("more than 10 MB", "/classify", b" " * (TEN_MB + 1))
    yield Case("as many texts as may be", "/embed", json.dumps({"inputs": ["a"] * 1024}).encode())
    yield Case("a text too many", "/embed", json.dumps({"inputs": ["a"] * 1025}).encode())


def compressed(rng: random.Random) -> Iterator[Case]:
    gzipped, deflated = gzip.compress(good("/embed"), mtime=0), zlib.compress(good("/embed"))

    def case(name: str, body: bytes, encoding: str = "gzip") -> Case:
        return Case(name, "/embed", body, {**JSON, "Content-Encoding": encoding})

    for megabytes in (1, 10, 11, 100, 1000, 10_000):
        yield case(f"a bomb of {megabytes} MB", bomb(megabytes))
    yield case("a bomb in a bomb", gzip.compress(bomb(100)))
    for place in range(0, len(gzipped), 3):
        yield case(f"gzip ends at {place}", gzipped[:place])
    for index in range(30):
        body = bytearray(gzipped)
        body[rng.randrange(10, len(body))] ^= 1 << rng.randrange(8)
        yield case(f"gzip flipped {index}", bytes(body))
    yield case("gzip goes on", gzipped + b"x")
    yield case("ten thousand empty streams", gzip.compress(b"", mtime=0) * 10_000)
    yield case("not compressed", good("/embed"))
    yield case("deflate for gzip", deflated)
    yield case("gzip for deflate", gzipped, "deflate")
    yield case("deflate without its head", deflated[2:-4], "deflate")
    for encoding in (
        "br",
        "zstd",
        "gzip, gzip",
        "identity, gzip",
        "chunked",
        "x" * 1000,
        "gzip;q=1",
    ):
        yield case(f"encoding {encoding[:20]}", gzipped, encoding)
    yield case("gzip", gzipped)
    yield case("deflate", deflated, "Deflate")


def bomb(megabytes: int) -> bytes:
    """Spaces, compressed to a thousandth, without the checksum that would be at its end."""
    stream = zlib.compressobj(wbits=31)
    first, second = (
        stream.compress(b" " * 10**6) + stream.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    return first + second * (megabytes - 1)


def mislabelled() -> Iterator[Case]:
    for content_type in (
        *("", "text/plain", "text/json", "application/xml", "application/x-www-form-urlencoded"),
        *(
            "multipart/form-data; boundary=x",
            "application",
            "/",
            ";",
            "application/json; charset=x",
        ),
        *("application/json; charset=utf-16", "*/*", "application/json, text/plain", "x" * 10_000),
        *("APPLICATION/JSON;charset=UTF-8", "application/ld+json", "application/json;;;a=b"),
    ):
        yield Case(
            f"as {content_type[:40]!r}", "/embed", good("/embed"), {"Content-Type": content_type}
        )
    for name, value in (
        *(("X-Request-Timeout-Ms", "0"), ("X-Request-Timeout-Ms", "9" * 5000)),
        *(("X-Request-Timeout-Ms", "1e3"), ("X-Request-Id", "x" * 5000), ("X-Request-Id", "\xe9")),
        *(("Accept", "x" * 5000), ("Accept", "application/x-ndjson"), ("X-Priority", "first")),
        *(("Authorization", "Bearer " + "x" * 5000), ("X-Long", "x" * 70_000)),
    ):
        yield Case(f"{name}: {value[:20]}", "/embed", good("/embed"), {**JSON, name: value})


def noise(rng: random.Random) -> Iterator[Case]:
    for index in range(80):
        yield Case(f"noise {index}", rng.choice([*GOOD]), rng.randbytes(rng.randrange(1, 2000)))


def made_up(rng: random.Random) -> Iterator[Case]:
    """JSON of any shape, with the fields that there are."""
    names = sorted({name for fields in FIELDS.values() for name in fields})

    def value(depth: int) -> Any:
        kind = rng.randrange(8 if depth else 6)
        if kind == 6:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {rng.choice(names): value(depth - 1) for _ in range(rng.randrange(4))}
        return rng.choice(VALUES[:11])

    for index in range(120):
        fields = {rng.choice(names): value(3) for _ in range(rng.randrange(5))}
        body = json.dumps(fields | {"inputs": value(2)} if rng.random() < 0.7 else fields)
        yield Case(f"made up {index}", rng.choice([*GOOD]), body.encode())
