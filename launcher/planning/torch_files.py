"""Sizes of the tensors in *.bin files, without unpickling: torch.save writes a zip archive with one stored entry
per storage (pytorch/caffe2/serialize/inline_container.cc), and tensors that share a storage share the entry.

The entries do not contain the element type; config.json has it. Files from before torch 1.6 are not archives;
their file size is used, which is some kilobytes more than their tensors.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from launcher.planning.model_files import open_model_file


def files_in(folder: Path) -> list[Path]:
    """pytorch_model*.bin, else every *.bin: training_args.bin and optimizer states are not weights."""
    found = sorted(folder.glob("*.bin"))
    return [file for file in found if file.name.startswith("pytorch_model")] or found


def storage_sizes(file: Path) -> list[int] | None:
    """Bytes of each storage in one file; None for other files. Raises ValueError for a broken archive."""
    try:
        with open_model_file(file) as stream:
            if not zipfile.is_zipfile(stream):
                return None
            with zipfile.ZipFile(stream) as archive:
                entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{file.name} is a broken archive: {error}") from error
    return [entry.file_size for entry in entries if "data" in Path(entry.filename).parts[1:-1]]
