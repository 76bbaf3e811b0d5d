"""The shape of the package, read from its imports: layers, cycles, walls, and who owns which setting."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ds_pretrain.deepspeed_keys import (
    KNOWN_SUBKEYS,
    LION_PARAMS,
    NATIVE_ADAM_PARAMS,
    TOP_LEVEL_KEYS,
    TORCH_ADAM_PARAMS,
    ZERO_KEYS,
)

ROOT = Path(__file__).parent.parent / "ds_pretrain"

# Imports go down only; modules of one layer see one another in layers 0 and 1, and inside one part above.
LAYERS: dict[str, int] = {
    name: layer
    for layer, names in enumerate(
        [
            "errors files reading world rank_files credentials",
            "attribution chunk_rule config run_file fields curves judged complaints paths timeline schedules "
            "state record plan identity spans rate_plot run_problems past quotas interval shares response "
            "watchdog watchdog_memory watchdog_plot base robust deepspeed_json deepspeed_keys "
            "deepspeed_values veto known_bad verdict watchdog_norm",
            "data models checkpoint monitor engine engine_start engine_load engine_sequence partitions "
            "run_directory stop cure meaning known_run run_lock",
            "curriculum stages preflight rehearsal save_advice save_costs run_places opening probing "
            "resuming incidents suspects healing saving shipping step evaluation train sample launch "
            "watchdog_replay audit branch branch_parent standing",
            "cli commands checkpoint_commands verify_resume __main__",
        ]
    )
    for name in names.split()
}
SEES_SIBLING = {
    ("run_directory", "cure"),
    ("run_directory", "known_run"),
    ("run_directory", "meaning"),
    ("run_directory", "run_lock"),
    ("known_run", "checkpoint"),
    ("meaning", "models"),
    ("preflight", "standing"),
    ("opening", "preflight"),
    ("opening", "rehearsal"),
    ("rehearsal", "curriculum"),
    ("opening", "curriculum"),
    ("opening", "stages"),
    ("saving", "curriculum"),
    ("sample", "curriculum"),
    ("preflight", "curriculum"),
    ("audit", "curriculum"),
    ("healing", "incidents"),
    ("healing", "suspects"),
    ("engine", "engine_load"),
    ("engine", "engine_sequence"),
    ("engine", "partitions"),
    ("engine_load", "partitions"),
    ("train", "preflight"),
    ("step", "saving"),
    ("saving", "shipping"),
    ("saving", "save_costs"),
    ("train", "curriculum"),
    *(("train", part) for part in ("stages", "opening", "run_places", "probing", "evaluation")),
    *(("train", part) for part in ("saving", "healing", "shipping", "step", "resuming")),
    ("resuming", "probing"),
    ("resuming", "stages"),
    ("audit", "preflight"),
    ("branch", "preflight"),
    ("branch", "branch_parent"),
    ("__main__", "cli"),
    ("cli", "checkpoint_commands"),
    ("cli", "commands"),
    ("commands", "checkpoint_commands"),
    ("commands", "verify_resume"),
}
HIGHEST_FOR_LAUNCH = 1  # the command that starts ranks shares files and exit codes with them, nothing else

# Where a library may be imported at all: a module, or a part as a whole.
WALLS: dict[str, tuple[str, ...]] = {
    "deepspeed": (
        *("engine", "engine_start", "engine_load", "engine_sequence"),
        *("checkpoint.universal", "checkpoint.snapshot"),
    ),
    "transformers": ("models", "data.prepare", "data.tokenizer", "checkpoint.export"),
    "datasets": ("data",),
    "tokenizers": ("data",),
    "wandb": ("monitor.wandb",),
    "fsspec": ("checkpoint.remote",),
    "os.environ": ("world", "launch"),
}
# What must be importable on a machine without torch, through all that is imported with it.
TORCH_FREE = (
    *(name for name, layer in LAYERS.items() if layer < 2),
    *(
        "run_directory",
        "stop",
        "preflight",
        "rehearsal",
        "curriculum",
        "launch",
        "cli",
        "__main__",
        "monitor",
    ),
    *("checkpoint.remote", "checkpoint.ship"),
    *("models.rope_settings", "models.rope_change", "models.rope_reference"),
    *(
        "models.check",
        "models.sharing_check",
        "models.flops",
        "data.indexed",
        "data.mixture",
        "data.sampler",
        "data.sources",
    ),
)
HEAVY = ("torch", "deepspeed", "transformers", "datasets", "wandb")

# What the DeepSpeed JSON owns, by its own names and by those that other trainers give it. `checkpoint` is a
# section of both: how often to save is the run file's, how shards are written is the JSON's.
OWNED_BY_DEEPSPEED = (
    (
        TOP_LEVEL_KEYS
        | ZERO_KEYS
        | NATIVE_ADAM_PARAMS
        | TORCH_ADAM_PARAMS
        | LION_PARAMS
        | KNOWN_SUBKEYS["bf16"]
    )
    | {"precision", "dtype", "fp16", "fp32", "mixed_precision", "zero", "zero_stage", "offload"}
    | {"clip", "clipping", "clip_grad", "grad_clip", "max_grad_norm", "beta1", "beta2", "lr", "scheduler"}
) - {"checkpoint"}


def test_the_package_keeps_its_layers_and_walls() -> None:
    assert find_violations(read_package(ROOT)) == []


def test_no_field_of_the_run_file_is_owned_by_the_deepspeed_json() -> None:
    assert owned_fields((ROOT / "config.py").read_text()) == []


def find_violations(sources: Mapping[str, str]) -> list[str]:
    """What is wrong with a package given as dotted module name, without `ds_pretrain.`, to source text."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    imports = {module: _resolved(_imports(tree), sources) for module, tree in trees.items()}
    return [
        *(f"{module} has no layer; give it one" for module in sources if part_of(module) not in LAYERS),
        *_layer_violations(imports),
        *_cycles(imports),
        *(v for module, tree in trees.items() for v in _wall_violations(module, tree)),
        *_torch_violations(trees, sources),
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
    """Dotted module name, without the package's own, to source text; the package itself is "__init__"."""
    sources = {}
    for path in root.rglob("*.py"):
        words = path.relative_to(root).with_suffix("").parts
        sources[".".join(words[:-1] if words[-1] == "__init__" and len(words) > 1 else words)] = (
            path.read_text()
        )
    text = sources.pop("__init__", "")
    assert not _imports(ast.parse(text)), "importing ds_pretrain must import nothing"
    return sources


def part_of(module: str) -> str:
    """The first word of a module: a file of the package, or a folder."""
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


def _resolved(names: set[str], sources: Mapping[str, str]) -> set[str]:
    """The modules of the package among `names`: the longest prefix of each that is one."""
    found = set()
    for name in names:
        words = name.split(".")
        if words[0] == "ds_pretrain":
            prefixes = [".".join(words[1:end]) for end in range(len(words), 1, -1)]
            found |= (
                {next((prefix for prefix in prefixes if prefix in sources), prefixes[-1])}
                if prefixes
                else set()
            )
    return found


def _layer_violations(imports: Mapping[str, set[str]]) -> Iterator[str]:
    for module, imported in sorted(imports.items()):
        for other in sorted(imported):
            here, there = part_of(module), part_of(other)
            if here == there or (here, there) in SEES_SIBLING or there == "__version__":
                continue
            mine, below = LAYERS.get(here, 0), LAYERS.get(there, 0)
            if below > mine:
                yield f"{module} (layer {mine}) imports {other} (layer {below}): imports go down only"
            elif below == mine and mine >= 2:
                yield f"{module} imports {other}: parts of layer {mine} do not know one another"
            elif here == "launch" and below > HIGHEST_FOR_LAUNCH:
                yield f"{module} imports {other}: launching and training share files and exit codes only"


def _cycles(imports: Mapping[str, set[str]]) -> Iterator[str]:
    """Each module that imports itself through others; a folder's __init__ is part of the way."""
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
            frontier = {m for f in frontier for m in _resolved(on_import.get(f, set()), sources)} - reached
            reached |= frontier
        for other in sorted(reached):
            for library in sorted({name.split(".")[0] for name in on_import.get(other, ())} & set(HEAVY)):
                through = "" if other == module else f" through {other}"
                yield f"{module} imports {library}{through}, and has to work without"


# The checker itself: each kind of fault, in a small package made up for it, is reported; its repair is not.

VIOLATIONS = {
    "a higher layer": (
        {"timeline": "from ds_pretrain.engine import x", "engine": ""},
        "imports go down only",
    ),
    "a higher layer inside a function": (
        {"config": "def f():\n    import ds_pretrain.train", "train": ""},
        "imports go down only",
    ),
    "siblings": (
        {"data.feed": "from ds_pretrain.models import loss", "models.loss": ""},
        "do not know one another",
    ),
    "siblings that are files": (
        {"run_directory": "from ds_pretrain.stop import S", "stop": ""},
        "do not know one another",
    ),
    "training that launches": (
        {"train": "from ds_pretrain.launch.run import run", "launch.run": ""},
        "do not know one another",
    ),
    "launching that sees data": (
        {"launch.run": "from ds_pretrain.data.indexed import open_source", "data.indexed": ""},
        "share files and exit codes",
    ),
    "preflight that trains": (
        {"preflight": "import ds_pretrain.train", "train": ""},
        "do not know one another",
    ),
    "a cycle": (
        {"plan": "import ds_pretrain.config", "config": "from ds_pretrain.plan import Plan"},
        "imports itself",
    ),
    "a cycle inside a part": (
        {"data.a": "import ds_pretrain.data.b", "data.b": "import ds_pretrain.data.a"},
        "imports itself",
    ),
    "a module without a layer": ({"utils": ""}, "has no layer"),
    "deepspeed outside": ({"train": "import deepspeed.comm as dist"}, "uses deepspeed"),
    "transformers outside": ({"data.feed": "from transformers import AutoConfig"}, "uses transformers"),
    "wandb outside": ({"monitor.monitor": "def f():\n    import wandb"}, "uses wandb"),
    "the environment": ({"engine": "import os\nx = os.environ['RANK']"}, "uses os.environ"),
    "the environment by name": ({"engine": "from os import environ"}, "uses os.environ"),
    "the environment by function": ({"data.feed": "import os\nos.getenv('A')"}, "uses os.environ"),
    "torch where it must not be": ({"state": "if True:\n    import torch.distributed"}, "imports torch"),
    "torch through another": (
        {"preflight": "from ds_pretrain.data.feed import Feed", "data.feed": "import torch"},
        "preflight imports torch through data.feed",
    ),
}


@pytest.mark.parametrize(("package", "report"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_package_with_a_fault_is_reported(package: dict[str, str], report: str) -> None:
    violations = find_violations(package)
    assert any(report in violation for violation in violations), violations


def test_a_sound_package_is_not_reported() -> None:
    package = {
        "cli": "from ds_pretrain import __version__\nfrom ds_pretrain.launch.run import run",
        "launch": "",
        "launch.run": "import os\nfrom ds_pretrain.errors import InputError\nos.environ",
        "train": "import torch\nfrom ds_pretrain.preflight import Inputs\nimport ds_pretrain.data.feed",
        "preflight": "from ds_pretrain.plan import Plan",
        "plan": "from ds_pretrain.errors import InputError",
        "errors": "",
        "data.feed": "import torch\nfrom ds_pretrain.data.indexed import T\nimport ds_pretrain.world",
        "data.indexed": "",
        "world": "import os\nos.environ\ndef f():\n    import torch",
        "engine": "import deepspeed",
    }
    assert find_violations(package) == []


def test_a_run_file_field_that_deepspeed_owns_is_reported() -> None:
    source = (
        "class ModelSection(Section):\n    config: str\n    bf16: bool = True\nclass B:\n    grad_clip: float"
    )
    assert owned_fields(source) == ["ModelSection.bf16", "B.grad_clip"]


def test_the_login_node_side_imports_nothing_heavy() -> None:
    launch = sorted(module for module in read_package(ROOT) if part_of(module) == "launch")
    modules = ["preflight", "run_directory", "stop", "cli", *launch]
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module('ds_pretrain.' + module)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
