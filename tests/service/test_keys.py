import hashlib
import re
from pathlib import Path

import pytest

from service.keys import Key, digest, join_keys, main, make_key, read_keys

SHA256 = hashlib.sha256(b"a").hexdigest()
RECORD = f'[keys.search]\nsha256 = "{SHA256}"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_are_read(tmp_path):
    """A file has a table for each key; a key is for inference, interactive and without rates unless it says so."""
    told = f"""
        {RECORD}
        [keys.nightly]
        sha256 = "{"0" * 64}"
        may = ["inference", "metrics"]
        priority = "bulk"
        requests_per_minute = 60
        tokens_per_minute = 1_000_000
    """
    search, nightly = read_keys(write(tmp_path, told)).values()
    assert (search.may, search.priority) == (("inference",), "interactive")
    assert (search.requests_per_minute, search.tokens_per_minute) == (None, None)
    assert nightly == Key(
        sha256="0" * 64,
        may=("inference", "metrics"),
        priority="bulk",
        requests_per_minute=60,
        tokens_per_minute=1_000_000,
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("keys", "Expected '=' after a key"),
        ("", "keys\n  Field required"),
        ("[keys]", "at least 1 item"),
        (RECORD + "[limits]\n", "limits\n  Extra inputs"),
        (RECORD + "sha265 = 1\n", "sha265\n  Extra inputs"),
        (RECORD + 'may = ["everything"]', "'inference', 'metrics' or 'admin'"),
        (RECORD + "may = []", "at least 1 item"),
        (RECORD + "requests_per_minute = 0", "greater than or equal to 1"),
        (RECORD.replace("search", '"a key"'), "should match pattern"),
        (RECORD.replace(SHA256, "quartet_in_plain"), "should match pattern"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, reason):
    """A typing error in the file neither grants nor denies access."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        read_keys(write(tmp_path, text))


def test_keys_of_several_places_are_joined():
    """All of them count."""
    a, b = Key(sha256="a" * 64), Key(sha256="b" * 64)
    assert join_keys({"a": a}, {}, {"b": b}) == {"a": a, "b": b}


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"a": Key(sha256="b" * 64)}, "two keys named a"), ({"b": Key(sha256="a" * 64)}, "a and b")],
)
def test_a_key_has_one_name_and_a_name_one_key(more, reason):
    """Two records with one name or one key would be ambiguous."""
    with pytest.raises(ValueError, match=reason):
        join_keys({"a": Key(sha256="a" * 64)}, more)


def test_a_key_is_made_and_its_record_printed(tmp_path, capsys):
    """The record can be appended to a file, and the key is printed for the administrator."""
    main(["search"])
    said = capsys.readouterr()
    key = re.search(r"^    (\S+)$", said.err, re.M)[1]
    assert read_keys(write(tmp_path, said.out)) == {"search": Key(sha256=digest(key).hex())}
    assert key not in said.out


def test_no_two_keys_are_alike():
    """A key is made of 256 random bits, in characters that a header takes."""
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"quartet_[A-Za-z0-9_-]{43}", key) for key in keys)


def test_a_name_that_toml_would_quote_is_refused(capsys):
    """A record can be written under any name that is taken."""
    with pytest.raises(SystemExit) as caught:
        main(["a.b"])
    assert caught.value.code == 2
    assert "NAME: letters" in capsys.readouterr().err
