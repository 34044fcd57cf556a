"""Reading CSV and TSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator
from pathlib import Path

from clipzoo.errors import ConfigError, first_line
from clipzoo.io.reading import ANY_SIZE, readable


def read_table(path: Path, columns: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a table in UTF-8, separated by tabs if its name ends in .tsv, else by commas.

    columns: names of columns that must exist.

    Raises:
        ConfigError: the file is no table, a column is missing, or a row has more or fewer values than columns.
    """
    try:
        with readable(path, ANY_SIZE) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            names = rows.fieldnames or []
            missing = sorted(set(columns) - set(names))
            if missing:
                raise ConfigError(
                    f"{path} has no column {missing[0]!r}, but: {', '.join(names)}; --image, --caption and --label "
                    "take the names of columns"
                )
            for row in rows:
                # A row with more or fewer values than columns has the key None, or the value None.
                if None in row or None in row.values():
                    raise ConfigError(f"{path}, line {rows.line_num}: the row does not have a value for each column")
                if any("\0" in row[column] for column in columns):
                    raise ConfigError(f"{path}, line {rows.line_num}: a value holds a NUL character")
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a table in UTF-8: {first_line(error)}") from None
