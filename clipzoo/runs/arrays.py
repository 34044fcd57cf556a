"""Arrays that an evaluation leaves in the run directory. Needs no torch."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from clipzoo import io

LARGEST = 512 * io.MB
REMEDY = "remove the dataset's files from the folder and evaluate the run again"


def read_arrays(path: Path, names: Iterable[str] = (), most: int = LARGEST) -> dict[str, np.ndarray]:
    """Return arrays of an .npz file by name, all of them by default.

    most: largest size in bytes of the file, and of all its arrays together, which may be compressed.

    Raises:
        DamagedFileError: the file or an array is missing or damaged, or too large.
    """
    with io.readable(path, most, REMEDY) as file:
        try:
            total = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist())
            if total > most:
                raise ValueError(f"{total:,} bytes of arrays, more than {most:,}")
            file.seek(0)
            with np.load(file) as arrays:
                return {name: _array(arrays, name) for name in names or arrays.files}
        # Damaged bytes end in OSError, ValueError, EOFError, BadZipFile, zlib.error, KeyError, SyntaxError and more.
        except Exception as error:
            raise io.DamagedFileError(path, f"is not an intact .npz file ({error})", REMEDY) from None


def _array(arrays: Any, name: str) -> np.ndarray:
    """Read an array of an .npz file whose header states no more bytes than the file has for it."""
    entry = next(entry for entry in arrays.zip.infolist() if entry.filename in (name, f"{name}.npy"))
    with arrays.zip.open(entry) as content:
        read = npy.read_array_header_1_0 if npy.read_magic(content) == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(content)
    if dtype.itemsize * math.prod(shape) > entry.file_size:
        raise ValueError(f"{name} is cut off")
    return arrays[name]
