"""Tokenizers as values: text to ids and back, the size of the vocabulary, the id that ends a document.

They are loaded from disk or from the Hugging Face hub, or trained. Nothing here imports torch, unless a
tokenizer exists only in a form that Transformers has to convert.
"""

import difflib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import check_folder, sync_folder
from ds_pretrain.data.indexed import TokenSource, corpus_file

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
_TOKENIZER = "tokenizer.json"
_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
TRAINING_NOTE = "training.json"  # beside a tokenizer that we trained: on what
FILES = (
    *(_TOKENIZER, *_CONFIG_FILES, TRAINING_NOTE),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
)
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# A name that ends like this is a file's: no repository is called so, and some hold a dot ("Llama-3.1-8B").
_FILE_ENDING = re.compile(
    r"\.(arrow|bin|csv|gz|html|idx|jsonl?|md|model|ndjson|parquet|py|tar|toml|tsv|txt|xml|yaml|zip|zst)$"
)
_HUB_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back. Special tokens written out in a text are text: only `eos_id` ends a document."""

    name: str  # absolute, if it is on disk: whoever reads it may stand in another folder
    vocab_size: int  # rows an embedding needs: added tokens included, and holes in the numbering too
    eos_id: int
    hash: str  # of everything that decides which ids come out
    model: Any = None  # a `tokenizers.Tokenizer`; None: each byte of UTF-8 is a token
    eos_token: str | None = None  # the text of `eos_id`, where it has one

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, with no separator and no special token added. Releases the GIL."""
        if self.model is None:
            return [np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) for text in texts]
        # One text a call: the caller's threads are the parallelism.
        return [
            np.array(self.model.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.int32)
            for text in texts
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out."""
        if self.model is None:
            return bytes(i for i in ids if i < NUM_BYTES).decode("utf-8", "replace")
        return str(self.model.decode([int(i) for i in ids], skip_special_tokens=True))


def load_tokenizer(name: str, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer at a path, in a model's folder, or on the Hugging Face hub; `bytes` is built in.

    Raises:
        InputError: there is none, or nothing says which token ends a document and `eos_token` is None.
    """
    if name == BYTES:
        if eos_token is not None:
            raise InputError(
                f"--eos-token {eos_token}: `bytes` ends a document with an id of its own, 256; leave it out"
            )
        digest = hashlib.sha256(b"bytes: UTF-8, EOS 256").hexdigest()
        return Tokenizer(BYTES, NUM_BYTES + 1, NUM_BYTES, digest)
    files = _read_files(name)
    if _TOKENIZER not in files:
        files = _convert_slow_tokenizer(name)
    model = _parse_json(name, files[_TOKENIZER])
    model.no_truncation()  # both are saved with some tokenizers and would cut or fill documents
    model.no_padding()
    model.encode_special_tokens = True
    ids = model.get_vocab(with_added_tokens=True)
    eos = eos_token or _find_eos(files)
    if eos is None or eos not in ids:
        found = "nothing says which token ends a document" if eos is None else f"it has no token {eos!r}"
        raise InputError(
            f"tokenizer {name}: {found}; pass the token with --eos-token, for example {_guess(ids)!r}"
        )
    eos_id = ids[eos]
    digest = hashlib.sha256(f"{model.to_str()} eos {eos_id}".encode()).hexdigest()
    where = os.path.abspath(name) if os.path.exists(name) else name
    return Tokenizer(where, max(len(ids), max(ids.values()) + 1), eos_id, digest, model, eos)


def copy_of(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with caches of its own, so that threads do not wait for one another."""
    if tokenizer.model is None:
        return tokenizer
    import tokenizers

    model = tokenizers.Tokenizer.from_str(tokenizer.model.to_str())
    model.encode_special_tokens = True  # not saved in the JSON
    return replace(tokenizer, model=model)


def open_tokenizer_of(source: TokenSource) -> Tokenizer | None:
    """The tokenizer that `source` was prepared with, by its PREFIX.json; None if that does not say.

    One that is not where it was is looked for beside the corpus: what moved together still works.

    Raises:
        InputError: it is in neither place, or another one is there now.
    """
    sidecar = source.sidecar or {}
    name, wanted = sidecar.get("tokenizer"), sidecar.get("tokenizer_hash")
    if name is None:
        return None
    note = corpus_file(source.prefix, "json")
    places = [name, str(source.prefix.absolute().parent / Path(name).name)]
    found = [place for place in places if place == BYTES or os.path.exists(place)]
    if not found and not _is_hub_name(name):
        raise InputError(
            f"{note}: its tokenizer is neither {places[0]} nor {places[1]}; put it back into one of the two"
        )
    for place in found or [name]:
        loaded = load_tokenizer(place, sidecar.get("eos_token"))
        if wanted in (None, loaded.hash):
            return loaded
    raise InputError(
        f"{note}: its tokenizer has hash {wanted:.16}, {' and '.join(found or [name])} {loaded.hash:.16}: "
        "it is another one, whose ids mean other text; put the right one there, or beside the corpus"
    )


def find_tokenizer_problems(folder: Path, sources: Iterable[TokenSource]) -> list[str]:
    """Sources whose ids mean other text than those of the model in `folder`, as far as both say which.

    Also a tokenizer there that cannot be read, whether or not a source could be compared with it.
    """
    if not (folder / _TOKENIZER).is_file():
        return []
    try:
        _parse_json(str(folder), _read_files(str(folder))[_TOKENIZER])
    except InputError as error:
        return list(error.problems)
    problems: list[str] = []
    for source in sources:
        sidecar = source.sidecar or {}
        if not sidecar.get("tokenizer_hash"):
            continue
        try:
            own = load_tokenizer(str(folder), sidecar.get("eos_token"))
        except InputError as error:
            problems += error.problems
            continue
        if own.hash != sidecar["tokenizer_hash"]:
            problems.append(
                f"{source.prefix} was prepared with the tokenizer {sidecar.get('tokenizer')!r} (hash "
                f"{sidecar['tokenizer_hash']:.16}), and the model in {folder} was trained with another "
                f"({own.hash:.16}): the same ids mean other text; prepare it with --tokenizer {folder}"
            )
    return list(dict.fromkeys(problems))


def find_tokenizer_warnings(folder: Path, sources: Iterable[TokenSource]) -> list[str]:
    """Warn where nobody can tell whether ids mean the same text to the model in `folder` and in a source."""
    if not (folder / _TOKENIZER).is_file():
        return [
            f"{folder} has no {_TOKENIZER}, so the sources' tokenizer could not be compared with the model's"
        ]
    silent = dict.fromkeys(str(s.prefix) for s in sources if not (s.sidecar or {}).get("tokenizer_hash"))
    if not silent:
        return []
    return [
        f"nothing says which tokenizer wrote {', '.join(silent)}, so it could not be compared with that of "
        f"{folder}: other ids would be other text; `ds-pretrain prepare --tokenizer {folder}` notes it"
    ]


def list_paths(name: str) -> list[Path]:
    """The folder and the files of a tokenizer on disk, there or to be trained: none of them is a text."""
    path = Path(name)
    if name == BYTES:
        return []
    folder = path.parent if path.is_file() else path
    return [path, *(folder / file for file in FILES)]


def _parse_json(name: str, text: str) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"tokenizer {name}: its {_TOKENIZER} cannot be read ({error}); copy the file again"
        ) from error


def find_name_problem(name: str, kind: Literal["dataset", "model"]) -> str | None:
    """Return why a name that is no path is not on the hub either; None if it is, or cannot be asked.

    The hub is asked once and briefly: the libraries that download would try again for half a minute.
    """
    parent, _, last = name.rstrip("/").rpartition("/")
    folder = parent or ("/" if name.startswith("/") else ".")
    neighbors = os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK) else []
    close = difflib.get_close_matches(last, neighbors, n=1)
    not_here = "no such file or folder" + (f" (did you mean {Path(parent) / close[0]}?)" if close else "")
    if not _is_hub_name(name):
        return not_here
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    api = HfApi()
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        ask(name.partition(":")[0], timeout=_HUB_SECONDS)
    except OfflineModeIsEnabled:
        return None  # what is cached will do, or its absence is said at once
    except RepositoryNotFoundError:
        return f"{not_here} here, and the hub has no {kind} of that name that you may read"
    except Exception as error:  # each version of the library has its own errors for a network
        return f"{not_here} here, and the hub cannot be reached ({format_first_line(error)})"
    return None


def format_first_line(error: Exception) -> str:
    """The first line of an error of a library, for a message of ours; its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_hub_name(name: str) -> bool:
    """Return whether a name is like NAME or OWNER/NAME (with :CONFIG), and not like a file's."""
    repository = name.partition(":")[0]
    return bool(_REPOSITORY.fullmatch(repository)) and not _FILE_ENDING.search(repository)


def _read_files(name: str) -> dict[str, str]:
    """The text of a tokenizer's files, by name: from a folder, a `tokenizer.json`, or the hub."""
    path = Path(name)
    if path.is_file():
        beside = {file: path.with_name(file) for file in _CONFIG_FILES}
        return {_TOKENIZER: _read(path)} | {file: _read(at) for file, at in beside.items() if at.is_file()}
    wanted = (_TOKENIZER, *_CONFIG_FILES)
    if path.is_dir():
        return {file: _read(path / file) for file in wanted if (path / file).is_file()}
    return _fetch_hub_files(name, wanted)


def _fetch_hub_files(name: str, wanted: Sequence[str]) -> dict[str, str]:
    """Fetch files from the hub, or from its cache where the hub cannot be reached."""
    problem = find_name_problem(name, "model")
    files: dict[str, str] = {}
    if _is_hub_name(name):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        local_only = problem is not None
        for file in wanted:
            try:
                files[file] = _read(Path(hf_hub_download(name, file, local_files_only=local_only)))
            except LocalEntryNotFoundError as error:  # also an EntryNotFoundError, hence first
                problem = problem or format_first_line(error)
            except EntryNotFoundError:
                continue
            except (OSError, ValueError) as error:
                problem, files = problem or format_first_line(error), {}
                break
    if problem and not files:
        raise InputError(
            f"tokenizer {name}: {problem}; expected `bytes`, a folder with a tokenizer.json (to train one, "
            f"add --train-tokenizer N), or a name on the hub: run `hf download {name}` where there is a "
            "connection, and copy the folder here"
        )
    return files


def _convert_slow_tokenizer(name: str) -> dict[str, str]:
    """The files of a tokenizer that has no tokenizer.json, as Transformers converts it."""
    try:
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            AutoTokenizer.from_pretrained(name).save_pretrained(folder)
            files = _read_files(folder)
    except Exception as error:
        raise InputError(
            f"tokenizer {name}: has no tokenizer.json and cannot be converted ({format_first_line(error)})"
        ) from error
    if _TOKENIZER not in files:
        raise InputError(
            f"tokenizer {name}: Transformers knows no fast form of it; convert it to a tokenizer.json"
        )
    return files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy the tokenizer's files again") from error


def _parse_config(name: str, text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"tokenizer: {name} is not JSON ({error}); copy the file again") from error
    return config if isinstance(config, dict) else {}


def _find_eos(files: dict[str, str]) -> str | None:
    for file in _CONFIG_FILES:
        token = _parse_config(file, files.get(file, "{}")).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            return str(token)
    return None


def _guess(ids: dict[str, int]) -> str:
    """A token of this vocabulary that looks like a separator."""
    usual = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
    return next((token for token in usual if token in ids), max(ids, key=ids.__getitem__))


def refuse_training(path: str, size: int, eos_token: str | None = None) -> None:
    """Writes nothing.

    Raises:
        InputError: a tokenizer of `size` entries cannot be trained at `path`, whatever the text.
    """
    folder, problems = Path(path), []
    if path == BYTES:
        problems.append("--train-tokenizer: `bytes` is built in; pass the folder to write with --tokenizer")
    elif problem := check_folder(folder.absolute().parent, "--tokenizer"):
        problems.append(problem)
    elif _is_foreign_folder(folder):
        problems.append(
            f"--tokenizer {path}: was not made by --train-tokenizer and is never overwritten; omit "
            f"--train-tokenizer to use an existing tokenizer, or name another path"
        )
    if eos_token not in (None, END_OF_TEXT):
        problems.append(
            f"--eos-token {eos_token}: a tokenizer that --train-tokenizer makes ends a document with "
            f"{END_OF_TEXT}; leave it out"
        )
    if size <= NUM_BYTES:
        problems.append(
            f"--train-tokenizer {size}: a byte-level tokenizer needs at least "
            f"{NUM_BYTES + 1} entries, {NUM_BYTES} bytes and {END_OF_TEXT}"
        )
    if problems:
        raise InputError(problems)


def train_once(
    texts: Iterator[str], path: str, size: int, note: str, overwrite: bool, say: Callable[[str], None]
) -> Tokenizer:
    """Train a tokenizer at `path`, unless an interrupted call has already trained this one there.

    `note` says what it is trained on, and is kept beside it.

    Raises:
        InputError: another one is there, and `overwrite` is False.
    """
    trained = Path(path) / TRAINING_NOTE
    if trained.is_file() and trained.read_text() == note:
        say(f"{path}: already trained on these inputs; used as it is")
        return load_tokenizer(path)
    if trained.is_file() and not overwrite:
        raise InputError(
            f"--tokenizer {path}: exists, and was not trained on these inputs with {size} entries; omit "
            f"--train-tokenizer to use it, choose another path, or pass --overwrite"
        )
    train_tokenizer(texts, size, Path(path), note)
    loaded = load_tokenizer(path)
    short = "" if loaded.vocab_size == size else f" (not {size}: the text has no more pairs to merge)"
    say(f"{path}: trained a tokenizer of {loaded.vocab_size} entries{short}")
    return loaded


def train_tokenizer(texts: Iterator[str], vocab_size: int, folder: Path, note: str) -> None:
    """Train a byte-level BPE of `vocab_size` entries and publish it as `folder`, whole or not at all.

    AutoTokenizer opens the folder, and so do we.

    Raises:
        InputError: it cannot be trained there.
    """
    refuse_training(str(folder), vocab_size)
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        model.save(str(temporary / "tokenizer.json"))
        (temporary / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
        (temporary / TRAINING_NOTE).write_text(note)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def _is_foreign_folder(folder: Path) -> bool:
    """Anything but a tokenizer that we trained: overwriting it would destroy what is not ours."""
    if not folder.is_dir():
        return folder.exists()
    names = {path.name for path in folder.iterdir()}
    return bool(names) and not (TRAINING_NOTE in names and names <= set(FILES))
