"""Names and docstrings: functions are verbs, docstrings are sentences, every module is in the glossary."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ds_pretrain"
VERBS = """
    accept accepts add advise align announce apply ask assemble await barrier begin bind blame
    broadcast build can cap capture carry check choose chunk claim classify clear clip collapse
    collect compare complete compose compute conclude construct convert copy count create decode
    deliver derive describe discard draw drop dump encode end ensure escape estimate evaluate
    execute exit expect explain extend fetch fill find finish flatten forget format gather generate
    get group guess has hash hide hold ignore initialize is iterate join judge keep kill label
    launch lay leave list load locate log look make map mark measure mix name normalize note open
    parse permute pin plan prepare preserve prove prune publish put quote raise rank reach read
    rebuild record recover refuse rename render reopen repair repeat replace replay report require
    reshard resolve respond restore resume run save say score scrub seal seed select set shorten
    show signal silence skip split spread start stir stop suggest sum sync take tidy to tokenize
    train try unpin unwrap update upload use uses verify wait walk warn withdraw wrap write
"""
# Pure functions that are named after the value that they return: a path, a formula, a count.
VALUES = """
    _abandoned_name _duration_validator _file_exists _state_path available_memory_bytes corpus_file
    cosine_fraction cross_entropy_and_z document_positions flops_per_token free_bytes
    gradient_clipping lr_scaling_factor main manifest_checksum marker_name norm_limit owner_rank
    partial_folder peak_flops ranks_folder rng_file sequence_parallel_size step_name steps
    token_losses unfinished_universal_folder universal_folder wsd_fraction zero_stage
"""
FRAGMENTS = {"Of", "What", "As", "Those", "That", "Where", "Which"}
MOST_TERMS = 60


def test_a_function_begins_with_a_verb_or_is_named_after_its_value() -> None:
    functions = [
        (path, node.name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    found = {name for _, name in functions}
    wrong = [
        f"{p.relative_to(ROOT)}: {name}"
        for p, name in functions
        if name not in VALUES.split() and not _is_verb(name)
    ]
    assert wrong == []
    assert found.issuperset(VALUES.split()), "a value that is gone"
    assert not {name for name in VALUES.split() if _is_verb(name)}, "a verb needs no entry"


def test_no_docstring_begins_as_a_fragment() -> None:
    folders = (PACKAGE, ROOT / "benchmarks", ROOT / "examples")
    wrong = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for text in _docstrings(path)
        if re.split(r"\W", text.strip(), maxsplit=1)[0] in FRAGMENTS
    ]
    assert wrong == []


def test_the_glossary_is_one_page_and_has_the_term_of_every_module() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
    )
    terms = [term for term, _, _ in rows if term != "term"]
    assert len(terms) == len(set(terms)) <= MOST_TERMS
    named = [name for _, _, modules in rows for name in re.findall(r"`(\w+)`", modules)]
    modules = {path.stem for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert sorted(set(named)) == sorted(modules)
    assert len(named) == len(set(named)), "a module belongs to one term"


def _is_verb(name: str) -> bool:
    return name.lstrip("_").split("_")[0] in VERBS.split()


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (
            text := ast.get_docstring(node)
        ):
            yield text
