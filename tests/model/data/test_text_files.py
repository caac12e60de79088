"""Text files are UTF-8, UTF-16 or UTF-32 by their byte order mark; others are refused with the place of the fault."""

import gzip

import pytest

from model.data import corpus
from model.data.checksums import DataError
from service.core.data_files.text_files import read_lines, read_text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_byte_order_marks(tmp_path, encoding, suffix):
    """They are no part of the first line, also of a corpus; line ends stay where the whole text is read."""
    content = "café\r\nb\n".encode(encoding)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)

    assert list(read_lines(path)) == [(1, "café\n"), (2, "b\n")]
    assert read_text(path) == "café\r\nb\n"
    assert list(corpus.documents([path])) == [["café", "b"]]


def test_the_place_of_a_wrong_byte(tmp_path):
    """The column counts characters, behind a byte order mark, too; a compressed file is no exception."""
    content = b"\xef\xbb\xbfcaf\xc3\xa9 \xfc\n"
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    for name in ("a.txt", "a.txt.gz"):
        with pytest.raises(
            DataError, match=rf"{name}:1: column 6: the byte 0xFC is not UTF-8 \('ü'"
        ):
            list(read_lines(tmp_path / name))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_without_a_byte_order_mark(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("text,label\n".encode(encoding))
    with pytest.raises(DataError, match=r"a\.txt: UTF-16 or UTF-32 without a byte order mark"):
        read_text(tmp_path / "a.txt")


def test_a_text_with_a_null_character(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\0b\n")
    assert "a\0b\n" == read_text(tmp_path / "a.txt")


def test_a_damaged_utf_16_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfea")
    with pytest.raises(DataError, match=r"a\.txt: begins as UTF-16 and is none"):
        read_text(tmp_path / "a.txt")
