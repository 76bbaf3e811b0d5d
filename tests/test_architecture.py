"""The shape of the package, read from its imports: rooms, layers, cycles, floors, walls, and its size."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from ds_pretrain.config.deepspeed import Bf16, DeepSpeedJson, Lion, NativeAdam, TorchAdam, ZeroOptimization

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "ds_pretrain"

# Imports go to a lower layer or stay in the room; rooms of one layer are blind to one another.
LAYERS = [
    ["core"],
    ["config"],
    ["data", "models", "engine", "checkpoint", "watchdog", "monitor"],
    ["training", "launch"],
    ["train"],
    ["commands"],
    ["__main__"],
]
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
# The command that starts ranks shares files and exit codes with them, and nothing else.
SEES_ONLY = {"launch": {"core"}, "core": set[str]()}

# Where a library may be imported at all: a module, or a room as a whole.
WALLS: dict[str, tuple[str, ...]] = {
    "deepspeed": ("engine", "checkpoint.universal", "checkpoint.snapshot"),
    "transformers": ("models", "data.tokenizer"),
    "datasets": ("data",),
    "tokenizers": ("data",),
    "wandb": ("monitor.wandb",),
    "fsspec": ("checkpoint.remote",),
    "os.environ": ("core.distributed", "launch"),
}
# What must be importable on a machine without torch, through all that is imported with it.
TORCH_FREE = (
    *("core", "config", "launch", "watchdog", "monitor", "commands.cli", "__main__"),
    *("training.preflight", "training.record", "checkpoint.remote", "checkpoint.upload"),
    *("models.rope_config", "models.config_check", "models.flops"),
    *("data.indexed", "data.mixture", "data.sampler", "data.inspect"),
)
HEAVY = ("torch", "deepspeed", "transformers", "datasets", "wandb")

MOST_MODULES = 115  # with the __init__ of each room
MOST_IN_A_ROOM = 16  # but `commands`, which has a file a sub-command
HIGHEST_FLOOR = 9  # the longest chain of imports; a module that imports nothing of ours is on floor 1
HIGHEST_FLOOR_OF_TRAIN = 8
MOST_SPLINTERS = 5
SPLINTER_LINES = 120  # a module below this that one other imports could live there
LONGEST_MODULE = 600
LONGEST_FUNCTION = 60

# What the DeepSpeed JSON owns, by its own names and by those that other trainers give it. Both files have
# `checkpoint` and `activation_checkpointing` (the run file says when, the JSON how), and
# `gradient_accumulation_steps`, which is derived and which either may insist on.
OWNED_BY_DEEPSPEED = (
    {
        key
        for section in (DeepSpeedJson, ZeroOptimization, NativeAdam, TorchAdam, Lion, Bf16)
        for key in section.model_fields
    }
    | {"precision", "dtype", "fp16", "fp32", "mixed_precision", "zero", "zero_stage", "offload"}
    | {"clip", "clipping", "clip_grad", "grad_clip", "max_grad_norm", "beta1", "beta2", "lr", "scheduler"}
) - {"checkpoint", "activation_checkpointing", "gradient_accumulation_steps"}


def test_the_package_has_its_rooms_and_nothing_beside_them() -> None:
    entries = {p.name for p in ROOT.iterdir() if p.name != "__pycache__"}
    rooms = {room for room in LAYER_OF if room not in ("train", "__main__")}
    assert entries == rooms | {"train.py", "__init__.py", "__main__.py", "py.typed"}
    assert len(rooms) == 11


def test_the_package_keeps_its_layers_and_walls() -> None:
    assert find_violations(read_package(ROOT)) == []


def test_the_package_stays_small_and_flat() -> None:
    sources = read_package(ROOT)
    assert len(list(ROOT.rglob("*.py"))) <= MOST_MODULES
    by_room: dict[str, list[str]] = {}
    for module in sources:
        by_room.setdefault(room_of(module), []).append(module)
    assert {r: m for r, m in by_room.items() if len(m) > MOST_IN_A_ROOM and r != "commands"} == {}
    floors = find_floors(sources)
    assert {m: floor for m, floor in floors.items() if floor > HIGHEST_FLOOR} == {}
    assert floors["train"] <= HIGHEST_FLOOR_OF_TRAIN
    splinters = find_splinters(sources)
    assert len(splinters) <= MOST_SPLINTERS, splinters


def test_no_module_and_no_function_is_long() -> None:
    assert find_long(read_package(ROOT)) == []


def test_the_map_in_the_documentation_names_every_module() -> None:
    page = (REPOSITORY / "docs/design/architecture.md").read_text()
    tree = re.search(r"```\n(ds_pretrain/.*?)```", page, re.DOTALL)
    assert tree is not None
    told: set[str] = set()
    room = ""
    for line in tree[1].splitlines()[1:]:
        if found := re.match(r"  (\w+)(/|\.py)\s+(.*)", line):
            name, kind, rest = found.groups()
            room = name if kind == "/" else ""
            told |= {name} if kind == ".py" else set()
            rest = rest if kind == "/" else ""
        else:
            rest = line.strip()
        told |= {f"{room}.{word}" for word in rest.partition("  ")[0].split()}
    assert told == set(read_package(ROOT)) - {"__main__"}


def test_no_field_of_the_run_file_is_owned_by_the_deepspeed_json() -> None:
    assert owned_fields((ROOT / "config/schema.py").read_text()) == []


def find_violations(sources: Mapping[str, str]) -> list[str]:
    """The faults of a package given as dotted module name, without `ds_pretrain.`, to source text."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    imports = {module: _resolve(_imports(tree), sources) for module, tree in trees.items()}
    return [
        *(f"{module} has no layer; give it one" for module in sources if room_of(module) not in LAYER_OF),
        *_layer_violations(imports),
        *_cycles(imports),
        *(v for module, tree in trees.items() for v in _wall_violations(module, tree)),
        *_torch_violations(trees, sources),
    ]


def find_floors(sources: Mapping[str, str]) -> dict[str, int]:
    """The length of the longest chain of imports from each module down.

    Imports inside functions count, but not those of `commands`, where each sub-command loads its own.
    """
    imports = {}
    for module, text in sources.items():
        tree = ast.parse(text)
        names = _imports_on_import(tree) if room_of(module) == "commands" else _imports(tree)
        imports[module] = _resolve(names, sources) & set(sources) - {module}

    @cache
    def floor(module: str) -> int:
        return 1 + max((floor(other) for other in imports[module]), default=0)

    return {module: floor(module) for module in sources}


def find_splinters(sources: Mapping[str, str]) -> list[str]:
    """Small modules with a single importer, outside `commands` and the walls that are one file."""
    importers: dict[str, set[str]] = {}
    for module, text in sources.items():
        for other in _resolve(_imports(ast.parse(text)), sources) - {module}:
            importers.setdefault(other, set()).add(module)
    walls = {"train"} | {place for places in WALLS.values() for place in places if len(places) == 1}
    return sorted(
        f"{module}, imported by {next(iter(importers[module]))} alone"
        for module, text in sources.items()
        if len(importers.get(module, ())) == 1
        if text.count("\n") < SPLINTER_LINES and room_of(module) != "commands" and module not in walls
    )


def find_long(sources: Mapping[str, str]) -> list[str]:
    """The modules and functions that are longer than a reader can hold in mind."""
    functions = [
        (module, node)
        for module, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [
        (f"{module}.{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for module, node in functions
    ]
    return [
        *(f"{m} has {n} lines" for m, t in sources.items() if (n := t.count("\n")) > LONGEST_MODULE),
        *(f"{name} has {lines} lines" for name, lines in long if lines > LONGEST_FUNCTION),
    ]


def owned_fields(config_source: str) -> list[str]:
    """The fields of the run file's sections whose names are settings of the DeepSpeed JSON."""
    return [
        f"{section.name}.{field.target.id}"
        for section in ast.walk(ast.parse(config_source))
        if isinstance(section, ast.ClassDef)
        for field in section.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if field.target.id in OWNED_BY_DEEPSPEED
    ]


def read_package(root: Path) -> dict[str, str]:
    """Dotted module name, without the package's own, to source text; the rooms' empty __init__ left out."""
    sources = {}
    for path in root.rglob("*.py"):
        words = path.relative_to(root).with_suffix("").parts
        if words[-1] == "__init__":
            assert not _imports(ast.parse(path.read_text())), f"{path} must import nothing"
        else:
            sources[".".join(words)] = path.read_text()
    return sources


def room_of(module: str) -> str:
    """The first word of a module: a folder of the package, or a file beside them."""
    return module.split(".")[0]


def _imports(tree: ast.AST) -> set[str]:
    """Dotted names imported anywhere in a module, also inside functions; `from a import b` gives a.b."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _imports_on_import(tree: ast.Module) -> set[str]:
    """The names imported when the module is: those outside functions."""
    statements: list[ast.AST] = list(tree.body)
    names: set[str] = set()
    while statements:
        node = statements.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= _imports(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            statements += ast.iter_child_nodes(node)
    return names


def _resolve(names: set[str], sources: Mapping[str, str]) -> set[str]:
    """The modules of the package among `names`: the longest prefix of each that is one."""
    found = set()
    for name in names:
        words = name.split(".")
        if words[0] == "ds_pretrain" and len(words) > 1:
            prefixes = [".".join(words[1:end]) for end in range(len(words), 1, -1)]
            found.add(next((prefix for prefix in prefixes if prefix in sources), prefixes[-1]))
    return found


def _layer_violations(imports: Mapping[str, set[str]]) -> Iterator[str]:
    for module, imported in sorted(imports.items()):
        for other in sorted(imported):
            here, there = room_of(module), room_of(other)
            if here == there or there == "__version__":
                continue
            mine, below = LAYER_OF.get(here, 0), LAYER_OF.get(there, 0)
            if below > mine:
                yield f"{module} (layer {mine}) imports {other} (layer {below}): imports go down only"
            elif below == mine:
                yield f"{module} imports {other}: rooms of layer {mine} do not know one another"
            elif here in SEES_ONLY and there not in SEES_ONLY[here]:
                yield f"{module} imports {other}: {here} sees nothing but {', '.join(SEES_ONLY[here])}"


def _cycles(imports: Mapping[str, set[str]]) -> Iterator[str]:
    """Each module that imports itself through others."""
    for start in sorted(imports):
        seen: set[str] = set()
        frontier = set(imports[start])
        while frontier:
            seen |= frontier
            frontier = {m for module in frontier for m in imports.get(module, ())} - seen
        if start in seen:
            yield f"{start} imports itself, through {', '.join(sorted(seen - {start})) or 'nothing else'}"


def _wall_violations(module: str, tree: ast.Module) -> Iterator[str]:
    libraries = {name.split(".")[0] for name in _imports(tree)}
    if _touches_environment(tree):
        libraries.add("os.environ")
    for library in sorted(libraries & set(WALLS)):
        if not any(module == place or module.startswith(f"{place}.") for place in WALLS[library]):
            yield f"{module} uses {library}, which only {', '.join(WALLS[library])} may"


def _touches_environment(tree: ast.Module) -> bool:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    return any(f"os.{name}" in _imports(tree) for name in names) or any(
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        for node in ast.walk(tree)
    )


def _torch_violations(trees: Mapping[str, ast.Module], sources: Mapping[str, str]) -> Iterator[str]:
    on_import = {module: _imports_on_import(tree) for module, tree in trees.items()}
    for module in sorted(trees):
        if not any(module == name or module.startswith(f"{name}.") for name in TORCH_FREE):
            continue
        reached, frontier = {module}, {module}
        while frontier:
            frontier = {m for f in frontier for m in _resolve(on_import.get(f, set()), sources)} - reached
            reached |= frontier
        for other in sorted(reached):
            for library in sorted({name.split(".")[0] for name in on_import.get(other, ())} & set(HEAVY)):
                through = "" if other == module else f" through {other}"
                yield f"{module} imports {library}{through}, and has to work without"


# The checker itself: each kind of fault, in a small package made up for it, is reported; its repair is not.

VIOLATIONS = {
    "a higher layer": (
        {"config.timeline": "from ds_pretrain.engine.engine import x", "engine.engine": ""},
        "imports go down only",
    ),
    "a higher layer inside a function": (
        {"config.schema": "def f():\n    import ds_pretrain.train", "train": ""},
        "imports go down only",
    ),
    "siblings": (
        {"data.loader": "from ds_pretrain.models import loss", "models.loss": ""},
        "do not know one another",
    ),
    "training that launches": (
        {"training.step": "from ds_pretrain.launch.run import run", "launch.run": ""},
        "do not know one another",
    ),
    "launching that sees the run file": (
        {"launch.run": "from ds_pretrain.config.plan import load_plan", "config.plan": ""},
        "launch sees nothing but core",
    ),
    "a cycle": (
        {
            "config.plan": "import ds_pretrain.config.schema",
            "config.schema": "from ds_pretrain.config.plan import Plan",
        },
        "imports itself",
    ),
    "a module without a layer": ({"utils": ""}, "has no layer"),
    "deepspeed outside": ({"train": "import deepspeed.comm as dist"}, "uses deepspeed"),
    "transformers outside": ({"data.loader": "from transformers import AutoConfig"}, "uses transformers"),
    "wandb outside": ({"monitor.monitor": "def f():\n    import wandb"}, "uses wandb"),
    "the environment": ({"engine.engine": "import os\nx = os.environ['RANK']"}, "uses os.environ"),
    "the environment by name": ({"engine.engine": "from os import environ"}, "uses os.environ"),
    "the environment by function": ({"data.loader": "import os\nos.getenv('A')"}, "uses os.environ"),
    "torch where it must not be": ({"core.state": "if True:\n    import torch.distributed"}, "imports torch"),
    "torch through another": (
        {"training.preflight": "from ds_pretrain.data.loader import L", "data.loader": "import torch"},
        "training.preflight imports torch through data.loader",
    ),
}


@pytest.mark.parametrize(("package", "report"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_package_with_a_fault_is_reported(package: dict[str, str], report: str) -> None:
    violations = find_violations(package)
    assert any(report in violation for violation in violations), violations


SOUND = {
    "commands.cli": "from ds_pretrain import __version__\ndef f():\n    import ds_pretrain.train",
    "launch.run": "import os\nfrom ds_pretrain.core.errors import InputError\nos.environ",
    "train": "import torch\nimport ds_pretrain.training.preflight\nimport ds_pretrain.data.loader",
    "training.preflight": "def f():\n    from ds_pretrain.config.plan import Plan",
    "config.plan": "from ds_pretrain.core.errors import InputError",
    "core.errors": "",
    "data.loader": "import torch\nfrom ds_pretrain.data.indexed import T",
    "data.indexed": "import ds_pretrain.core.distributed",
    "core.distributed": "import os\nos.environ\ndef f():\n    import torch",
    "engine.engine": "import deepspeed",
}


def test_a_sound_package_is_not_reported() -> None:
    assert find_violations(SOUND) == []


def test_floors_count_the_longest_chain_of_imports() -> None:
    floors = find_floors(SOUND)
    assert floors["core.errors"] == 1
    assert floors["training.preflight"] == 3  # inside a function, and counted
    assert floors["train"] == 4
    assert floors["commands.cli"] == 1  # inside a function of a command: loaded when that is called


def test_small_modules_with_one_importer_and_long_functions_are_found() -> None:
    assert find_splinters(SOUND) == [
        "config.plan, imported by training.preflight alone",
        "core.distributed, imported by data.indexed alone",
        "data.indexed, imported by data.loader alone",
        "data.loader, imported by train alone",
        "training.preflight, imported by train alone",
    ]
    assert find_long({"a": "x = 1\n" * 601, "b": "def f():\n" + "    x = 1\n" * 60}) == [
        *("a has 601 lines", "b.f has 61 lines")
    ]


def test_a_run_file_field_that_deepspeed_owns_is_reported() -> None:
    source = (
        "class ModelSection(Section):\n    config: str\n    bf16: bool = True\nclass B:\n    grad_clip: float"
    )
    assert owned_fields(source) == ["ModelSection.bf16", "B.grad_clip"]


def test_the_login_node_side_imports_nothing_heavy() -> None:
    launch = sorted(module for module in read_package(ROOT) if room_of(module) == "launch")
    modules = ["training.preflight", "training.record", "core.run_files", "commands.cli", *launch]
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module('ds_pretrain.' + module)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
