"""From the name that a user gives to a folder on disk: a local folder as it is, a hub name through its cache.

`huggingface_hub` decides where the cache is and honours HF_HUB_OFFLINE; it is imported only for a hub name.
"""

import os
import re
from pathlib import Path

from usp.errors import UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NEEDED_FILES = ["*.json", "*.safetensors", "*.model", "*.pth"]
ANSWER_SECONDS = 5.0  # how long the hub may take to answer before the cache alone is asked


def resolve_checkpoint(name_or_path: str) -> Path:
    """A local folder, or the cached download of a hub name `org/name`. Raises UserError saying what to download."""
    path = Path(os.path.expanduser(name_or_path))  # unlike Path's own, leaves the name of an unknown user as it is
    if name_or_path and os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise UserError(f"{path} is a file; give the folder of the checkpoint")
    if not HUB_NAME.fullmatch(name_or_path):
        raise UserError(
            f"there is no folder {name_or_path!r}; give the folder of a checkpoint, or a hub name such as org/name"
        )
    return _download(name_or_path)


def _download(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    refusal = _ask_hub(repo)
    try:
        folder = snapshot_download(repo, allow_patterns=NEEDED_FILES, local_files_only=refusal is not None)
    except Exception as error:  # its own errors and those of its HTTP client have no common base that is public
        raise UserError(
            f"there is no folder {repo} here, and the hub did not give it ({refusal or _first_line(error)}); "
            f"on a machine with network run `hf download {repo} --local-dir {repo.split('/')[1]}`, "
            f"copy that folder here and give its path"
        ) from error
    return Path(folder)


def _ask_hub(repo: str) -> str | None:
    """Why the hub cannot be used, or None. snapshot_download sets no limit of its own on this first question."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repo, timeout=ANSWER_SECONDS)
    except Exception as error:  # of many kinds, as above
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
