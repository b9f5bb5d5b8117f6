"""`.pth` files as torch.save has written them since 2020, looked into without torch and without unpickling.

Such a file is a zip archive: one entry per tensor, and `data.pkl`, a program that builds the table of names. Reading
the program's strings, without running it, tells which names there are.
"""

import pickletools
import zipfile
from pathlib import Path

from usp.errors import CheckpointError

MAX_PROGRAM_BYTES = 1 << 24  # that of umT5-xxl takes some 30 kB


def archive_entries(file: Path) -> list[tuple[str, int, int]]:
    """(name, size, checksum) of every entry, from the directory at the end of the file."""
    try:
        with zipfile.ZipFile(file) as archive:
            return [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    except Exception as error:  # a damaged archive makes the library raise errors of many kinds
        raise CheckpointError(f"{file}: truncated, or not written by torch.save ({error})") from error


def archived_names(file: Path) -> set[str]:
    """All strings in `data.pkl`; the names of the tensors are among them. Raises CheckpointError naming the file."""
    programs = [(name, nbytes) for name, nbytes, _ in archive_entries(file) if name.endswith("/data.pkl")]
    if len(programs) != 1 or programs[0][1] > MAX_PROGRAM_BYTES:
        raise CheckpointError(f"{file}: a zip archive without one data.pkl, so torch.save did not write it")
    try:
        with zipfile.ZipFile(file) as archive:
            program = archive.read(programs[0][0])
        return {argument for _, argument, _ in pickletools.genops(program) if isinstance(argument, str)}
    except Exception as error:  # as above
        raise CheckpointError(f"{file}: its table of names is damaged ({error}); download the file again") from error
