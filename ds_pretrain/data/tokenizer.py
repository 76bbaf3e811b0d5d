"""Tokenizers as values: text to ids and back, the size of the vocabulary, the id that ends a document.

Nothing here imports torch, unless a tokenizer exists only in a form that Transformers has to convert.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.errors import InputError
from ds_pretrain.files import sync_folder

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
_NUM_BYTES = 256
_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back. Special tokens written out in a text are text: only `eos_id` ends a document."""

    name: str
    vocab_size: int  # rows an embedding needs: added tokens included, and holes in the numbering too
    eos_id: int
    hash: str  # of everything that decides which ids come out
    model: Any = None  # a `tokenizers.Tokenizer`; None: each byte of UTF-8 is a token

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
            return bytes(i for i in ids if i < _NUM_BYTES).decode("utf-8", "replace")
        return str(self.model.decode([int(i) for i in ids], skip_special_tokens=True))


def load_tokenizer(name: str, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer at a path, in a model's folder, or on the Hugging Face hub; `bytes` is built in.

    Raises:
        InputError: there is none, or nothing says which token ends a document and `eos_token` is None.
    """
    if name == BYTES:
        digest = hashlib.sha256(b"bytes: UTF-8, EOS 256").hexdigest()
        return Tokenizer(BYTES, _NUM_BYTES + 1, _NUM_BYTES, digest)
    import tokenizers

    files = _files_of(name)
    if "tokenizer.json" not in files:
        files = _converted(name)
    try:
        model = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"tokenizer {name}: its tokenizer.json cannot be read ({error})") from error
    model.no_truncation()  # both are saved with some tokenizers and would cut or fill documents
    model.no_padding()
    model.encode_special_tokens = True
    ids = model.get_vocab(with_added_tokens=True)
    eos = eos_token or _eos_of(files)
    if eos is None or eos not in ids:
        found = "nothing says which token ends a document" if eos is None else f"it has no token {eos!r}"
        raise InputError(
            f"tokenizer {name}: {found}; pass the token with --eos-token, for example {_guess(ids)!r}"
        )
    eos_id = ids[eos]
    digest = hashlib.sha256(f"{model.to_str()} eos {eos_id}".encode()).hexdigest()
    return Tokenizer(name, max(len(ids), max(ids.values()) + 1), eos_id, digest, model)


def copy_of(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with caches of its own, so that threads do not wait for one another."""
    if tokenizer.model is None:
        return tokenizer
    import tokenizers

    model = tokenizers.Tokenizer.from_str(tokenizer.model.to_str())
    model.encode_special_tokens = True  # not saved in the JSON
    return Tokenizer(tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id, tokenizer.hash, model)


def train_tokenizer(texts: Iterator[str], vocab_size: int, folder: Path, note: str) -> None:
    """Train a byte-level BPE of `vocab_size` entries and publish it as `folder`, whole or not at all.

    `note` (what it was trained on) is kept beside it. AutoTokenizer opens the folder, and so do we.

    Raises:
        InputError: fewer entries than the bytes and the separator take.
    """
    if vocab_size <= _NUM_BYTES:
        raise InputError(
            f"--train-tokenizer {vocab_size}: a byte-level tokenizer needs at least "
            f"{_NUM_BYTES + 1} entries, {_NUM_BYTES} bytes and {END_OF_TEXT}"
        )
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
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    temporary.chmod(0o755)
    model.save(str(temporary / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (temporary / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (temporary / "training.json").write_text(note)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    sync_folder(folder.parent)


def _files_of(name: str) -> dict[str, str]:
    """The text of a tokenizer's files, by name: from a folder, a `tokenizer.json`, or the hub."""
    path = Path(name)
    wanted = ("tokenizer.json", *_CONFIG_FILES)
    if path.is_file():
        beside = {file: path.with_name(file) for file in _CONFIG_FILES}
        return {
            "tokenizer.json": path.read_text(),
            **{file: at.read_text() for file, at in beside.items() if at.is_file()},
        }
    if path.is_dir():
        return {file: (path / file).read_text() for file in wanted if (path / file).is_file()}
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise InputError(
            f"tokenizer {name}: no such file or folder; expected `bytes`, a folder with a tokenizer.json, "
            "or the name of a tokenizer on the hub (to train one there, add --train-tokenizer N)"
        )
    return _hub_files(name, wanted)


def _hub_files(name: str, wanted: Sequence[str]) -> dict[str, str]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    files = {}
    for file in wanted:
        try:
            files[file] = Path(hf_hub_download(name, file)).read_text()
        except LocalEntryNotFoundError as error:  # also an EntryNotFoundError, hence first
            raise _hub_problem(name, error) from error
        except EntryNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise _hub_problem(name, error) from error
    return files


def _hub_problem(name: str, error: Exception) -> InputError:
    reason = str(error).strip().splitlines()[0]
    return InputError(
        f"tokenizer {name}: no such folder here, and not to be had from the hub ({reason}); give a "
        f"folder with a tokenizer.json, or on a machine with a connection run "
        f"`hf download {name}` and copy the folder here"
    )


def _converted(name: str) -> dict[str, str]:
    """The files of a tokenizer that has no tokenizer.json, as Transformers converts it."""
    try:
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            AutoTokenizer.from_pretrained(name).save_pretrained(folder)
            files = _files_of(folder)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"tokenizer {name}: has no tokenizer.json and cannot be converted ({reason})"
        ) from error
    if "tokenizer.json" not in files:
        raise InputError(
            f"tokenizer {name}: Transformers knows no fast form of it; convert it to a tokenizer.json"
        )
    return files


def _eos_of(files: dict[str, str]) -> str | None:
    for file in _CONFIG_FILES:
        token = json.loads(files.get(file, "{}")).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            return str(token)
    return None


def _guess(ids: dict[str, int]) -> str:
    """A token of this vocabulary that looks like a separator."""
    usual = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
    return next((token for token in usual if token in ids), max(ids, key=ids.__getitem__))
