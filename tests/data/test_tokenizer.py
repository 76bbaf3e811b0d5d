"""Tokenizers as values: bytes, saved ones with their traps, trained ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from ds_pretrain.core.errors import InputError
from ds_pretrain.data import tokenizer as module
from ds_pretrain.data.indexed import IndexedWriter, TokenSource, open_source
from ds_pretrain.data.tokenizer import Tokenizer, copy_of, load_tokenizer, open_tokenizer_of, train_tokenizer

TEXTS = ["def f(x):\n    return x + 1\n", "naïve café ☃ 𝄞", "<|endoftext|> is text here", ""]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "bpe"
    train_tokenizer(iter(TEXTS * 20), 300, folder, "note")
    return folder


def save_word_level(folder: Path, change: Any = None, **config: object) -> Path:
    """A tokenizer of five words, `</s>` among them, after `change(model)`."""
    words = {"[UNK]": 0, "a": 1, "b": 2, "</s>": 3, "<s>": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["</s>", "<s>"])
    if change is not None:
        change(model)
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_bytes_are_tokens_and_come_back() -> None:
    loaded = load_tokenizer("bytes")
    assert (loaded.vocab_size, loaded.eos_id) == (257, 256)
    for text, ids in zip(TEXTS, loaded.encode(TEXTS), strict=True):
        assert bytes(ids.tolist()) == text.encode()
        assert loaded.decode([*ids, 256]) == text


def test_a_trained_tokenizer_has_every_byte_and_comes_back(trained: Path) -> None:
    loaded = load_tokenizer(str(trained))
    assert loaded.vocab_size == 300
    assert load_tokenizer(str(trained / "tokenizer.json")).hash == loaded.hash
    for text, ids in zip(TEXTS, loaded.encode(TEXTS), strict=True):
        assert loaded.decode(ids) == text
        assert loaded.eos_id not in ids
    assert (trained / "training.json").read_text() == "note"
    assert [path.name for path in trained.parent.iterdir()] == ["bpe"]


def test_a_trained_tokenizer_opens_in_transformers_with_the_same_ids(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(trained)), load_tokenizer(str(trained))
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.eos_id)
    assert theirs(TEXTS[1], add_special_tokens=False)["input_ids"] == ours.encode(TEXTS[1:2])[0].tolist()
    assert theirs.decode(ours.encode(TEXTS[:1])[0].tolist()) == TEXTS[0]


def test_training_twice_gives_the_same_tokenizer(trained: Path, tmp_path: Path) -> None:
    train_tokenizer(iter(TEXTS * 20), 300, tmp_path / "again", "other")
    assert load_tokenizer(str(tmp_path / "again")).hash == load_tokenizer(str(trained)).hash


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--train-tokenizer 256: .* at least 257 entries, 256 bytes and"):
        train_tokenizer(iter(TEXTS), 256, tmp_path / "t", "")
    assert list(tmp_path.iterdir()) == []


def test_p41_the_vocabulary_counts_added_tokens_and_holes(tmp_path: Path) -> None:
    plain = load_tokenizer(str(save_word_level(tmp_path / "plain", eos_token="</s>")))
    added = save_word_level(
        tmp_path / "added", lambda m: m.add_special_tokens(["<x>", "<y>", "<z>"]), eos_token="</s>"
    )
    loaded = load_tokenizer(str(added))
    assert (plain.vocab_size, loaded.vocab_size) == (5, 8)
    assert loaded.hash != plain.hash
    model = json.loads((added / "tokenizer.json").read_text())
    model["model"]["vocab"]["b"] = 100  # no id between 8 and 100
    (added / "tokenizer.json").write_text(json.dumps(model))
    assert load_tokenizer(str(added)).vocab_size == 101


def test_p37_special_tokens_come_neither_from_the_tokenizer_nor_from_the_text(tmp_path: Path) -> None:
    def add_both(model: Any) -> None:
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 4), ("</s>", 3)]
        )

    loaded = load_tokenizer(str(save_word_level(tmp_path / "t", add_both, eos_token={"content": "</s>"})))
    for one in (loaded, copy_of(loaded)):
        assert [ids.tolist() for ids in one.encode(["a b", "a b a"])] == [[1, 2], [1, 2, 1]]
    bpe = tmp_path / "bpe"
    train_tokenizer(iter(TEXTS * 20), 300, bpe, "")
    written_out = load_tokenizer(str(bpe))
    for one in (written_out, copy_of(written_out)):
        assert one.eos_id not in one.encode(["x<|endoftext|>y"])[0]


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_cut_documents(tmp_path: Path) -> None:
    def cut_and_fill(model: Any) -> None:
        model.enable_truncation(2)
        model.enable_padding(length=4)

    loaded = load_tokenizer(str(save_word_level(tmp_path / "t", cut_and_fill, eos_token="</s>")))
    assert [ids.tolist() for ids in loaded.encode(["a b a b a", "a"])] == [[1, 2, 1, 2, 1], [1]]


def test_eos_is_read_from_either_file_or_given(tmp_path: Path) -> None:
    folder = save_word_level(tmp_path / "t")
    with pytest.raises(InputError, match=r"nothing says which token ends a document; .*--eos-token.*'</s>'"):
        load_tokenizer(str(folder))
    with pytest.raises(InputError, match="it has no token '<eos>'; pass the token with --eos-token"):
        load_tokenizer(str(folder), "<eos>")
    assert load_tokenizer(str(folder), "<s>").eos_id == 4
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    loaded = load_tokenizer(str(folder))
    assert loaded.eos_id == 3
    assert loaded.hash != load_tokenizer(str(folder), "<s>").hash


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "a/b/c", "tok.json", "a b", "~/tok", "tok/"])
def test_a_tokenizer_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"tokenizer {name}: no such file or folder; expected `bytes`"):
        load_tokenizer(name)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"its tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_folder_that_transformers_cannot_convert_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json and cannot be converted"):
        load_tokenizer(str(tmp_path))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub with one tokenizer, `some/model`: `hub["down"]` takes it from the net and leaves the cache."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    state: dict[str, Any] = {"folder": save_word_level(tmp_path / "hub", eos_token="</s>"), "down": False}
    state |= {"cached": True, "asked": []}

    def model_info(self: object, name: str, timeout: float) -> None:
        state["asked"].append((name, timeout))
        if state["down"]:
            raise OSError("no route to the hub")

    def download(name: str, file: str, local_files_only: bool) -> str:
        assert name == "some/model"
        assert local_files_only == state["down"]
        if not (state["cached"] or not state["down"]):
            raise LocalEntryNotFoundError("not cached, and offline")
        if not (state["folder"] / file).exists():
            raise EntryNotFoundError(file)
        return str(state["folder"] / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return state


def test_a_hub_tokenizer_is_read_from_its_files(hub: dict[str, Any]) -> None:
    loaded = load_tokenizer("some/model")
    assert loaded.hash == load_tokenizer(str(hub["folder"])).hash
    assert loaded.name == "some/model"  # a hub name is the same everywhere
    ((name, timeout),) = hub["asked"]
    assert name == "some/model"
    assert timeout <= 5


def test_a_hub_tokenizer_without_a_connection_is_read_from_the_cache(hub: dict[str, Any]) -> None:
    hub["down"] = True
    assert load_tokenizer("some/model").hash == load_tokenizer(str(hub["folder"])).hash


def test_a_hub_name_that_is_nowhere_says_both(hub: dict[str, Any]) -> None:
    hub.update(down=True, cached=False)
    with pytest.raises(
        InputError,
        match=r"tokenizer some/model: no such file or folder here, and the hub cannot be reached "
        r"\(no route to the hub\); .*`hf download some/model`",
    ):
        load_tokenizer("some/model")
    assert len(hub["asked"]) == 1  # once: the libraries would try for half a minute


def test_bytes_have_no_token_of_text_to_end_a_document() -> None:
    with pytest.raises(
        InputError, match=r"--eos-token <s>: `bytes` ends a document with an id of its own, 256"
    ):
        load_tokenizer("bytes", "<s>")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", [b"{", b"[" * 100_000])
def test_a_broken_config_beside_a_tokenizer_is_refused(tmp_path: Path, name: str, text: bytes) -> None:
    folder = save_word_level(tmp_path / "t")
    (folder / name).write_bytes(text)
    with pytest.raises(InputError, match=f"tokenizer: {name} is not JSON"):
        load_tokenizer(str(folder))


def test_a_tokenizer_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(
        InputError, match=r"tokenizer\.json: cannot be read .*copy the tokenizer's files again"
    ):
        load_tokenizer(str(tmp_path))


def corpus(prefix: Path, tokenizer: Tokenizer, **changed: object) -> TokenSource:
    """A corpus that says it was prepared with `tokenizer`."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(prefix, tokenizer.vocab_size)
    writer.add([np.array([1, 2, tokenizer.eos_id])])
    sidecar = {
        "tokenizer": tokenizer.name,
        "tokenizer_hash": tokenizer.hash,
        "eos_token": tokenizer.eos_token,
    }
    writer.finish({**{key: value for key, value in sidecar.items() if value is not None}, **changed})
    return open_source(prefix)


def test_a_source_gives_its_tokenizer_back_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_word_level(tmp_path / "tok")
    monkeypatch.chdir(tmp_path)
    loaded = load_tokenizer("tok", "<s>")  # nothing in the folder says that <s> ends a document
    assert loaded.name == str(tmp_path / "tok")
    source = corpus(tmp_path / "data/x", loaded)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = open_tokenizer_of(source)
    assert again is not None
    assert (again.hash, again.eos_id) == (loaded.hash, 4)


def test_a_source_of_bytes_and_a_foreign_one(tmp_path: Path) -> None:
    loaded = open_tokenizer_of(corpus(tmp_path / "x", load_tokenizer("bytes")))
    assert loaded is not None
    assert loaded.name == "bytes"
    (tmp_path / "x.json").unlink()
    assert open_tokenizer_of(open_source(tmp_path / "x")) is None


def test_a_tokenizer_that_moved_is_found_beside_the_corpus(tmp_path: Path) -> None:
    loaded = load_tokenizer(str(save_word_level(tmp_path / "tok", eos_token="</s>")))
    source = corpus(tmp_path / "data/x", loaded)
    (tmp_path / "tok").rename(tmp_path / "data/tok")
    moved = open_tokenizer_of(source)
    assert moved is not None
    assert (moved.name, moved.hash) == (str(tmp_path / "data/tok"), loaded.hash)
    save_word_level(
        tmp_path / "tok", lambda m: m.add_tokens(["x"]), eos_token="</s>"
    )  # another one, in its place
    again = open_tokenizer_of(source)
    assert again is not None
    assert again.hash == loaded.hash
    (tmp_path / "data/tok").rename(tmp_path / "gone")
    with pytest.raises(
        InputError, match=rf"x\.json: its tokenizer has hash {loaded.hash[:16]}, .*tok .*: it is another one"
    ):
        open_tokenizer_of(source)
    (tmp_path / "tok").rename(tmp_path / "gone too")
    with pytest.raises(
        InputError, match=r"x\.json: its tokenizer is neither .*/tok nor .*/data/tok; put it back"
    ):
        open_tokenizer_of(source)


def test_loading_a_tokenizer_from_disk_imports_neither_torch_nor_transformers(trained: Path) -> None:
    code = (
        "import sys; from ds_pretrain.data.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(trained)!r});"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ids_come_as_arrays_that_hold_them(trained: Path) -> None:
    for loaded in (load_tokenizer("bytes"), load_tokenizer(str(trained))):
        assert all(np.issubdtype(ids.dtype, np.integer) for ids in loaded.encode(TEXTS))
    assert module.BYTES == "bytes"
