"""Tables of the user: rows by column, and one message for each fault."""

from __future__ import annotations

import pytest

from clipzoo.errors import ConfigError
from clipzoo.io import read_table


def test_a_table_is_read_with_commas_or_tabs_and_quoted_lines(tmp_path):
    (tmp_path / "a.csv").write_bytes('\ufeffpath,title\nx.png,"two\nlines, one comma"\n'.encode())
    (tmp_path / "b.tsv").write_text("path\ttitle\nx.png\tone, two\n")
    assert list(read_table(tmp_path / "a.csv", ["path"])) == [{"path": "x.png", "title": "two\nlines, one comma"}]
    assert list(read_table(tmp_path / "b.tsv", ["title"])) == [{"path": "x.png", "title": "one, two"}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"path,title\nx.png\n", "line 2: the row does not have a value for each column"),
        (b"path,title\nx.png,a,b\n", "line 2: the row does not have a value for each column"),
        (b"path,name\nx.png,a\n", "has no column 'title', but: path, name"),
        (b"", "has no column 'path', but: "),
        (b"path,title\n\xff\xfe,a\n", "is not a table in UTF-8"),
        (b'path,title\n"x,a\n', "is not a table in UTF-8"),
        (b"path,title\nx\0.png,a\n", "a value holds a NUL character"),
    ],
)
def test_a_fault_of_a_table_is_named_with_its_line_or_column(tmp_path, content, words):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        list(read_table(path, ["path", "title"]))
