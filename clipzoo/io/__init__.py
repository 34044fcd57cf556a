"""The one place that writes files, and the one that reads files which may be damaged. Needs neither torch nor numpy."""

from clipzoo.io.figures import draw, save_figure
from clipzoo.io.folders import digest_of, ensure_folder
from clipzoo.io.reading import (
    DamagedFileError,
    DamageLog,
    read_json,
    read_json_lines,
    read_lines,
    read_text,
    read_yaml,
    readable,
    require_fields,
    require_numbers,
)
from clipzoo.io.writing import (
    NO_SPACE,
    JsonLines,
    WriteError,
    explained,
    make_folder,
    publish_folder,
    whole,
    write_error,
    write_json,
    write_whole,
)

__all__ = [
    "NO_SPACE",
    "DamageLog",
    "DamagedFileError",
    "JsonLines",
    "WriteError",
    "digest_of",
    "draw",
    "ensure_folder",
    "explained",
    "make_folder",
    "publish_folder",
    "read_json",
    "read_json_lines",
    "read_lines",
    "read_text",
    "read_yaml",
    "readable",
    "require_fields",
    "require_numbers",
    "save_figure",
    "whole",
    "write_error",
    "write_json",
    "write_whole",
]
