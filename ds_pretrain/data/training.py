"""A tokenizer of one's own: trained once, published whole, and never over something else."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import folder_problem, sync_folder
from ds_pretrain.data.tokenizer import (
    BYTES,
    END_OF_TEXT,
    FILES,
    NUM_BYTES,
    TRAINING_NOTE,
    Tokenizer,
    load_tokenizer,
)


def refuse_training(path: str, size: int, eos_token: str | None = None) -> None:
    """Writes nothing.

    Raises:
        InputError: a tokenizer of `size` entries cannot be trained at `path`, whatever the text.
    """
    folder, problems = Path(path), []
    if path == BYTES:
        problems.append("--train-tokenizer: `bytes` is built in; pass the folder to write with --tokenizer")
    elif problem := folder_problem(folder.absolute().parent, "--tokenizer"):
        problems.append(problem)
    elif _holds_something_else(folder):
        problems.append(
            f"--tokenizer {path}: holds something that --train-tokenizer did not make, and is never "
            "overwritten; leave out --train-tokenizer to use a tokenizer that is there, or name another path"
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
            f"--tokenizer {path}: exists, and was not trained on these inputs with {size} entries; leave out "
            "--train-tokenizer to use it, choose another path, or pass --overwrite"
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


def _holds_something_else(folder: Path) -> bool:
    """Anything but a tokenizer that we trained: overwriting it would destroy what is not ours."""
    if not folder.is_dir():
        return folder.exists()
    names = {path.name for path in folder.iterdir()}
    return bool(names) and not (TRAINING_NOTE in names and names <= set(FILES))
