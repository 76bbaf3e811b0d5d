"""What a family of Transformers declares about its config, read from its source: no import, milliseconds.

Importing Transformers' config classes takes seconds; parsing two files of theirs does not. Tests compare what
is read here with the imported classes.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

# Keys of published config.json files that no config class declares as a field and that change nothing here.
_HARMLESS_KEYS = frozenset(
    (
        *("model_type", "auto_map", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash"),
        *("num_labels", "output_attentions", "_attn_implementation_autoset"),
    )
)
_LEGACY_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
_KEY_PATTERNS = (
    r"""kwargs\.(?:pop|get|setdefault)\(\s*["'](\w+)["']""",
    r"""["'](\w+)["'] (?:not )?in kwargs""",
    r"""(?:get|has)attr\(\s*(?:self\.)?config,\s*["'](\w+)["']""",
    r"""\bconfig\.(\w+)""",
)


@dataclass(frozen=True)
class Family:
    """The config class of a family, as its source declares it."""

    class_name: str
    types: Mapping[str, ast.expr]  # of each key that is checked by its class, by each of its names
    defaults: Mapping[str, Any]  # of each key whose default is plain
    own_keys: frozenset[str]  # declared, by each name
    known_keys: frozenset[str]  # declared, or read by hand: any other would be taken and ignored
    source: str

    def value(self, config: Mapping[str, Any], key: str) -> Any:
        """What the family makes of a key: the config's value, or the default."""
        return config.get(key, self.defaults.get(key))


def transformers_folder() -> Path | None:
    """Where Transformers is installed, or None."""
    spec = importlib.util.find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def read_family(family: str) -> Family | None:
    """The family's config class; None if Transformers is not installed or says it in another way."""
    folder = transformers_folder()
    try:
        return None if folder is None else _read(folder, family)
    except (OSError, LookupError, SyntaxError, StopIteration):
        return None


@lru_cache(maxsize=1)
def known_activations() -> frozenset[str]:
    """Names of activation functions; empty if they cannot be read."""
    return _keys_of_table("activations.py", "ACT2CLS")


@lru_cache(maxsize=1)
def known_rope_types() -> frozenset[str]:
    """Names of rotary scalings that any family has, without "default"; empty if they cannot be read."""
    return _keys_of_table("modeling_rope_utils.py", "ROPE_INIT_FUNCTIONS")


def admits(expected: ast.expr, value: Any) -> bool:
    """True if a JSON value has an annotated type; as strict as the classes, and true for what is not plain.

    The rules are those of https://github.com/huggingface/huggingface_hub (dataclasses.py).
    """
    match expected:
        case ast.Constant(value=None):
            return value is None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return admits(left, value) or admits(right, value)
        case ast.Name(id="RopeParameters"):
            return isinstance(value, dict)
        case ast.Name(id="int"):
            return isinstance(value, int) and not isinstance(value, bool)
        case ast.Name(id=("float" | "bool" | "str" | "list" | "dict") as name):
            return isinstance(
                value, {"float": float, "bool": bool, "str": str, "list": list, "dict": dict}[name]
            )
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return isinstance(value, list) and all(admits(item, one) for one in value)
        case ast.Subscript(value=ast.Name(id="dict")):
            return isinstance(value, dict)
    return True


def in_words(expected: ast.expr) -> str:
    """An annotated type, for a message."""
    parts = list(dict.fromkeys(_words(expected)))
    if {"a whole number", _FLOAT} <= set(parts):
        parts = ["a number", *(p for p in parts if p not in ("a whole number", _FLOAT))]
    return " or ".join(parts)


_FLOAT = "a number with a decimal point or an exponent, like 1.0"


def _words(expected: ast.expr) -> Iterator[str]:
    match expected:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _words(left)
            yield from _words(right)
        case ast.Constant(value=None):
            yield "null"
        case ast.Name(id=name):
            plain = {"int": "a whole number", "float": _FLOAT, "bool": "true or false", "str": "text"}
            yield {**plain, "list": "a list", "dict": "an object"}.get(name, "an object")
        case ast.Subscript(value=ast.Name(id="list")):
            yield "a list"
        case _:
            yield "an object"


def _read(folder: Path, family: str) -> Family:
    auto = _tree(folder / "models" / "auto" / "auto_mappings.py")
    classes = {"gpt-sw3": "GPT2Config"} | _pairs(auto, "CONFIG_MAPPING_NAMES")
    modules = {"gpt-sw3": "gpt2"} | _pairs(auto, "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    module = modules.get(family, family.replace("-", "_"))
    files = sorted((folder / "models" / module).glob("configuration_*.py"))
    found = ((file, *_class(file, classes[family])) for file in files)
    file, text, node = next(row for row in found if row[2] is not None)
    assert node is not None
    _, base = _class(folder / "configuration_utils.py", "PreTrainedConfig")
    assert base is not None
    fields = {**_fields(base), **_fields(node)}
    aliases = _plain(node, "attribute_map") or {}
    types = {name: field.annotation for name, field in _fields(node).items()}
    types |= {alias: _or_null(types[name]) for alias, name in aliases.items() if name in types}
    own = frozenset(fields) | aliases.keys()
    source = "".join(ast.get_source_segment(text, item) or "" for item in node.body if _is_post_init(item))
    model_code = file.with_name(file.name.replace("configuration_", "modeling_"))
    source += model_code.read_text() if model_code.is_file() else ""
    read_by_hand = {key for pattern in _KEY_PATTERNS for key in re.findall(pattern, source)}
    known = own | _HARMLESS_KEYS | _generation_keys(folder) | read_by_hand
    return Family(
        classes[family],
        types,
        dict(_defaults(fields, aliases)),
        own,
        known | (_LEGACY_ROPE_KEYS if "rope_parameters" in own else frozenset()),
        source + text,
    )


@lru_cache(maxsize=8)
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _class(path: Path, name: str) -> tuple[str, ast.ClassDef | None]:
    text = path.read_text()
    if f"class {name}(" not in text:
        return text, None
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return text, node
    return text, None


def _fields(node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    return {
        item.target.id: item
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    }


def _or_null(expected: ast.expr) -> ast.expr:
    """The same, or null, which counts as absent under a key's other name."""
    return ast.BinOp(expected, ast.BitOr(), ast.Constant(None))


def _defaults(fields: Mapping[str, ast.AnnAssign], aliases: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name in (*fields, *aliases):
        field = fields.get(aliases.get(name, name))
        try:
            yield name, ast.literal_eval(field.value) if field and field.value else None
        except ValueError:
            continue


def _plain(node: ast.ClassDef, name: str) -> Any:
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return ast.literal_eval(value)
    return None


def _is_post_init(item: ast.stmt) -> bool:
    return isinstance(item, ast.FunctionDef) and item.name == "__post_init__"


def _pairs(tree: ast.Module, name: str) -> dict[str, str]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(args=[pairs])) if found == name:
                return dict(ast.literal_eval(pairs))
    raise LookupError(name)


@lru_cache(maxsize=1)
def _generation_keys(folder: Path) -> frozenset[str]:
    text = (folder / "generation" / "configuration_utils.py").read_text()
    body = text.partition("def _get_default_generation_params")[2].partition("return {")[2].partition("}")[0]
    return frozenset(re.findall(r'"(\w+)":', body))


def _keys_of_table(file: str, name: str) -> frozenset[str]:
    folder = transformers_folder()
    try:
        text = (folder / file).read_text() if folder else ""
    except OSError:
        return frozenset()
    table = re.search(rf"^{name}\b[^\n]*= \{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'^    "(\w+)":', table[1], re.MULTILINE) if table else ())
