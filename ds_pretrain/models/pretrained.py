"""The weights of a public model that a run begins with: what its files hold, and their way into the model.

Format: https://huggingface.co/docs/safetensors (eight bytes of length, a JSON header, then the tensors).
`read_pretrained` reads headers and a few samples, without torch: only reading values imports it.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_pretrain.core.distributed import World, broadcast_from_main, gather_objects
from ds_pretrain.core.errors import InputError, mark_agreed
from ds_pretrain.core.jsonl import show_value
from ds_pretrain.core.text import format_count_of, join_listed, parse_json, read_text

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
# Buffers that older files hold and models compute themselves: causal masks and rotary tables.
_COMPUTED = re.compile(r"(^|\.)(attn\.(masked_)?bias|attention\.(masked_)?bias|rotary_emb\.inv_freq)$")
_KINDS = (
    "F32",
    "BF16",
    "F16",
    "F64",
)  # what a weight may be stored as; other numbers need a scale, or are none
_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # of its numbers, as the format names them: F32, BF16, I64, ...


@dataclass(frozen=True)
class Pretrained:
    """A folder with the weights of a model."""

    folder: Path
    tensors: Mapping[str, Stored]
    fingerprint: str  # of every name, shape and type, and of samples of the values: other weights differ


def read_pretrained(folder: Path, setting: str) -> Pretrained:
    """Read the headers of a model's weights. `setting` names the key of the run file.

    Raises:
        InputError: no such folder, no safetensors in it, or files that are missing or cut short.
    """
    if not folder.is_dir():
        raise InputError(
            f"{setting} = {folder} is not a folder; name one with a config.json and safetensors, as `hf "
            f"download NAME --local-dir FOLDER` or save_pretrained make it"
        )
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    digest = hashlib.sha256()
    for file in _list_files(folder, setting):
        try:
            header = _read_header(file)
            digest.update(json.dumps(header, sort_keys=True).encode())
            for sample in _read_samples(file):
                digest.update(sample)
        except (OSError, ValueError) as error:
            problems.append(f"{setting}: {file} cannot be used ({error}); download it again")
            continue
        tensors |= {
            name: Stored(file, tuple(entry["shape"]), entry["dtype"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    if problems:
        raise InputError(problems)
    return Pretrained(folder, tensors, digest.hexdigest()[:32])


def _list_files(folder: Path, setting: str) -> list[Path]:
    if (folder / _INDEX).is_file():
        return [folder / name for name in _read_index(folder / _INDEX, setting)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickles = any(folder.glob("pytorch_model*.bin"))
    found = "only pickles (pytorch_model.bin), which can run code" if pickles else "neither"
    raise InputError(
        f"{setting}: {folder} should hold {_SINGLE} or {_INDEX}, and has {found}"
        + ("; convert it with save_pretrained" if pickles else "; name a model's own folder")
    )


def _read_index(path: Path, setting: str) -> list[str]:
    """The files that an index names."""
    index = parse_json(read_text(path, setting), f"{setting}: {path}")
    files = index.get("weight_map")
    if isinstance(files, Mapping) and files and all(isinstance(file, str) for file in files.values()):
        return sorted(set(files.values()))
    found = (
        f"found {show_value(files)}" if "weight_map" in index else f"it has {show_value(list(index))} alone"
    )
    raise InputError(
        f'{setting}: {path} should have a "weight_map", which says in which file each tensor is; {found}: '
        "download it again"
    )


def _read_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", _read_exactly(opened.read(8), 8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError("it does not begin as a safetensors file does")
        header = json.loads(_read_exactly(opened.read(length), length))
    try:
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
        assert all(isinstance(entry["dtype"], str) and isinstance(entry["shape"], list) for entry in entries)
    except (AssertionError, AttributeError, LookupError, TypeError) as error:
        raise ValueError("its header is not one of safetensors") from error
    if (size := file.stat().st_size) != end:
        raise ValueError(f"it has {size:,} bytes, its header says {end:,}")
    return dict(header)


def _read_exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError("it ends in its header")
    return data


def _read_samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        for index in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            yield opened.read(_SAMPLE_BYTES)


def load_pretrained(model: Any, pretrained: Pretrained, world: World, gather: Any) -> tuple[Any, ...]:
    """Fill `model` with the weights of `base`, in the model's own type, and measure what arrived. Collective.

    `gather` and the reports are those of `init`. Read on rank 0 where parameters are partitioned, else on
    every rank; one parameter at a time.

    Raises:
        InputError: on every rank, as `check_pretrained` has them, or with each tensor that cannot be read or
            holds values that are no numbers.
        UninitializedWeightsError: something did not arrive.
    """
    from ds_pretrain.models.init import check_weights, expect_values
    from ds_pretrain.models.param_groups import is_partitioned, iterate_parameters

    if problems := check_pretrained(model, pretrained):
        raise InputError(problems)
    asked, names, wrong = {}, _find_stored_names(model, pretrained), []
    for name, _, parameter in iterate_parameters(model):
        with gather([parameter]):  # on every rank, whatever one of them meets in it
            if world.is_main or not is_partitioned(parameter):
                values = _read(pretrained.tensors[names[name][0]].file, names[name][0], parameter.dtype)
                if isinstance(values, str):
                    wrong.append(values)
                    continue
                parameter.data.copy_(values)
                asked[name] = expect_values(values)
    if everyone := list(dict.fromkeys(p for found in gather_objects(world, wrong) for p in found)):
        raise mark_agreed(InputError(everyone))
    return check_weights(model, broadcast_from_main(world, asked), gather)


def _read(file: Path, name: str, dtype: Any) -> Any | str:
    """The values of a tensor, or why it cannot be used."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            values = opened.get_tensor(name).to(dtype)
    except (OSError, SafetensorError) as error:
        return (
            f"model.pretrained: {file}: {name} cannot be read ({error}); look at that disk, or "
            f"download it again"
        )
    if num_wrong := int((~values.isfinite()).sum()):
        return (
            f"model.pretrained: {file}: {name} has {num_wrong:,} of {values.numel():,} values that are NaN "
            f"or infinite in {str(dtype).removeprefix('torch.')}; download it again, or take another model"
        )
    return values


def check_pretrained(model: Any, pretrained: Pretrained) -> list[str]:
    """Parameters that `base` lacks, or has in another shape or as no plain numbers, and surplus tensors.

    Also a tied output head that the file has with other values than the embedding's.
    """
    from ds_pretrain.models.param_groups import get_whole_shape, iterate_parameters

    names = _find_stored_names(model, pretrained)
    shapes = {name: get_whole_shape(parameter) for name, _, parameter in iterate_parameters(model)}
    missing = [f"{name} {list(shapes[name])}" for name, stored in names.items() if not stored]
    other = [
        f"{key} {list(pretrained.tensors[key].shape)}, expected {list(shapes[name])}"
        for name, stored in names.items()
        for key in stored
        if pretrained.tensors[key].shape != shapes[name]
    ]
    coded = [
        f"{key} ({pretrained.tensors[key].kind})"
        for stored in names.values()
        for key in stored
        if pretrained.tensors[key].kind not in _KINDS
    ]
    used = {key for stored in names.values() for key in stored}
    surplus = [key for key in pretrained.tensors if key not in used and not _is_computed(model, key)]
    problems = [
        f"model.pretrained: {pretrained.folder} {what} {len(found)} of the model's tensors: "
        f"{join_listed(found, _SHOWN)}"
        for found, what in ((missing, "lacks"), (other, "has in another shape"))
        if found
    ]
    if coded:
        problems.append(
            f"model.pretrained: {pretrained.folder} has {len(coded)} of the model's tensors as numbers that "
            f"no weights are trained as: {join_listed(coded, _SHOWN)}; expected {', '.join(_KINDS)}: take "
            "the model from before it was quantized"
        )
    if surplus:
        problems.append(
            f"model.pretrained: {pretrained.folder} has {format_count_of(len(surplus), 'tensor')} that "
            f"the model of its config.json does not have: {join_listed(surplus, _SHOWN)}"
        )
    if (missing and surplus) or any("experts" in name for name in missing):
        problems[-1] += "; names have to be those of the model's own code in the installed Transformers"
    return problems or list(_find_untied(names, pretrained))


def _find_stored_names(model: Any, pretrained: Pretrained) -> dict[str, list[str]]:
    """Map each parameter's first name to its keys in `pretrained`; a tied one may have several."""
    from ds_pretrain.models.param_groups import iterate_parameters

    owned = {id(parameter): name for name, _, parameter in iterate_parameters(model)}
    names: dict[str, list[str]] = {name: [] for name in owned.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for key in _list_spellings(model, name):
            if key in pretrained.tensors and key not in names[owned[id(parameter)]]:
                names[owned[id(parameter)]].append(key)
                break
    return names


def _list_spellings(model: Any, name: str) -> Iterator[str]:
    """A name as the whole model has it, and as a file of its bare body does."""
    yield name
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if prefix != "." and name.startswith(prefix):
        yield name.removeprefix(prefix)


def _is_computed(model: Any, key: str) -> bool:
    buffers = {spelling for name, _ in model.named_buffers() for spelling in _list_spellings(model, name)}
    return key in buffers or _COMPUTED.search(key) is not None


def _find_untied(names: dict[str, list[str]], pretrained: Pretrained) -> Iterator[str]:
    from safetensors import safe_open

    for first, *others in (stored for stored in names.values() if len(stored) > 1):
        for other in others:
            with (
                safe_open(pretrained.tensors[first].file, "pt") as one,
                safe_open(pretrained.tensors[other].file, "pt") as two,
            ):
                # NaN is no other value than NaN here; that it is none at all is told when it is read
                if not one.get_tensor(first).nan_to_num().equal(two.get_tensor(other).nan_to_num()):
                    yield (
                        f"model.pretrained: {pretrained.folder} has {first} and {other} with different "
                        "values, and its "
                        'config ties them; set "tie_word_embeddings" to false there'
                    )
