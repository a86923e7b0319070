"""Opens files of a model. Other users may own them (the instances' user downloads them), and root reads them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

# The largest is an index of weight files: about 100 bytes for each tensor.
MAX_JSON_BYTES: Final = 256 << 20


def open_model_file(file: Path) -> BinaryIO:
    """Opens a regular file, or the target of a link; not a pipe, which could block, nor a device, which may be endless.

    Raises OSError; ValueError for another kind of file.
    """
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    stream = os.fdopen(fd, "rb")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        stream.close()
        raise ValueError(f"{file.name} is not a regular file")
    return stream


def read_model_json(file: Path) -> bytes:
    """The content of a JSON file. Raises OSError; ValueError for other content or a file that is too large."""
    with open_model_file(file) as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{file.name} has more than {MAX_JSON_BYTES >> 20} MiB")
    return data
