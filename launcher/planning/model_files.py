"""Opens the files of a model. Others may write them (downloads are the instances' user's), and root reads them here."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

# The largest is an index of weight files: about 100 bytes for each tensor.
MAX_JSON_BYTES: Final = 256 << 20


def open_model_file(file: Path) -> BinaryIO:
    """A regular file, or what a link leads to. A pipe would wait for a writer for ever, and a device has no end.

    Raises OSError; ValueError where it is none.
    """
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    stream = os.fdopen(fd, "rb")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        stream.close()
        raise ValueError(f"{file.name} is not a regular file")
    return stream


def read_model_json(file: Path) -> bytes:
    """The whole of a file of JSON. Raises OSError; ValueError for one that is none, or far too large for one."""
    with open_model_file(file) as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{file.name} has more than {MAX_JSON_BYTES >> 20} MiB")
    return data
