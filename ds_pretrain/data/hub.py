"""Does a name that is not here mean a path, or something on the Hugging Face hub? Asked once, and briefly."""

import difflib
import os
import re
from pathlib import Path
from typing import Literal

_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# A name that ends like this is a file's: no repository is called so, and some hold a dot ("Llama-3.1-8B").
_FILE_ENDING = re.compile(
    r"\.(arrow|bin|csv|gz|html|idx|jsonl?|md|model|ndjson|parquet|py|tar|toml|tsv|txt|xml|yaml|zip|zst)$"
)
_TIMEOUT_SECONDS = 5.0


def means_path(name: str) -> bool:
    """Whether `name` can only be a path: not name or owner/name (with :config), or with a file's ending."""
    repository = name.partition(":")[0]
    return not _REPOSITORY.fullmatch(repository) or bool(_FILE_ENDING.search(repository))


def not_here(name: str) -> str:
    """`no such file or folder`, with the neighbor that was probably meant."""
    parent, _, last = name.rstrip("/").rpartition("/")
    folder = parent or ("/" if name.startswith("/") else ".")
    neighbors = os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK) else []
    close = difflib.get_close_matches(last, neighbors, n=1)
    meant = f" (did you mean {Path(parent) / close[0]}?)" if close else ""
    return f"no such file or folder{meant}"


def missing_from_hub(name: str, kind: Literal["dataset", "model"]) -> str | None:
    """Why a repository cannot be had from the hub; None if it is there, or if nobody may ask (offline mode).

    One request of a few seconds at most: the libraries that download would try again for half a minute.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    api = HfApi()
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        ask(name.partition(":")[0], timeout=_TIMEOUT_SECONDS)
    except OfflineModeIsEnabled:
        return None  # what is cached will do, or its absence is said at once
    except RepositoryNotFoundError:
        return f"the hub has no {kind} of that name that you may read"
    except Exception as error:  # each version of the library has its own errors for a network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the hub cannot be reached ({reason})"
    return None
