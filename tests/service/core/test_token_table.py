"""Files of the tokens of OpenAI's tokenizer."""

import pytest

from service.core.token_table import read_token_table
from service.settings_sources import ConfigError, configure


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no token"),
        ("YQ== 0\nYg==\n", "line 2"),
        ("YQ== zero\n", "line 1"),
        ("Y!== 0\n", "line 1"),
        ("\ufeffYQ== 0\n", "line 1"),
    ],
)
def test_files_that_are_no_table(tmp_path, content, reason):
    """A fault is named by its line, and the service does not start with such a file."""
    path = tmp_path / "a.tiktoken"
    path.write_text(content)
    with pytest.raises(ValueError, match=reason):
        read_token_table(path)
    with pytest.raises(ConfigError, match=f"a.tiktoken: .*{reason}"):
        configure({"tiktoken_file": path, "bundles": (tmp_path,)})


def test_missing_files(tmp_path):
    """The service does not start without the file."""
    with pytest.raises(ConfigError, match=r"none\.tiktoken: No such file"):
        configure({"tiktoken_file": tmp_path / "none.tiktoken", "bundles": (tmp_path,)})


def test_table(tmp_path):
    """A line has a token in base64 and its id, in any order."""
    path = tmp_path / "a.tiktoken"
    path.write_text("Yg== 1\n\nYQ== 0\n")
    assert "ab" == read_token_table(path).decode([0, 1, 100257])
    with pytest.raises(KeyError, match="2"):
        read_token_table(path).decode([2])
