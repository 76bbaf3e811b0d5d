"""The documentation names what is there, and nothing that is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from ds_pretrain.config.loader import find_section_models
from ds_pretrain.config.schema import Run
from tests.conftest import DEFAULT_TIER
from tests.run_file_page import PAGE, build_page

ROOT = Path(__file__).parent.parent


def test_the_table_of_the_run_file_page_is_the_one_that_the_schema_gives() -> None:
    page = PAGE.read_text()
    assert build_page(page) == page, "run: python -m tests.run_file_page"
    documented = set(re.findall(r"^\| `([a-z_.A-Z]+)` \|", page, re.MULTILINE))
    assert {"out", "schedule.peak_lr", "sources.NAME.max_epochs", "phases.rope.theta"} <= documented


def test_every_key_of_the_run_file_has_a_description() -> None:
    bare = [
        f"{section.__name__}.{name}"
        for section in find_all_sections(Run)
        for name, field in section.model_fields.items()
        if not field.description and not find_section_models(field.annotation)
    ]
    assert bare == []


def find_all_sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [m for field in section.model_fields.values() for m in find_section_models(field.annotation)]
    return [section, *(found for model in inner for found in find_all_sections(model))]


def test_every_file_that_the_documentation_links_to_exists() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ds_configs/*.md")]
    missing = [
        (page.name, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert missing == []


def test_every_module_that_the_documentation_names_exists() -> None:
    there = {
        path.name
        for folder in ("ds_pretrain", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    missing = [
        (page.name, name)
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for name in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", page.read_text())
        if name not in there
    ]
    assert missing == []


def test_the_exit_code_table_of_the_readme_is_that_of_the_code() -> None:
    from ds_pretrain.core import errors

    table = re.findall(r"^\| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {int(code) for code in table} == set(errors.EXIT_MEANINGS)


def test_the_page_of_field_problems_lists_the_tests_that_are_named_after_them() -> None:
    rows = re.findall(
        r"^\| P-(\d+) .*\| (`.+`) \|$", (ROOT / "docs/field-problems.md").read_text(), re.MULTILINE
    )
    documented = {number: set(re.findall(r"`([^`]+)`", files)) for number, files in rows}
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for number in re.findall(r"^def test_p(\d+)_", path.read_text(), re.MULTILINE):
            found.setdefault(number, set()).add(path.relative_to(ROOT / "tests").as_posix())
    assert documented == found


@pytest.fixture(scope="module")
def default_tier(request: pytest.FixtureRequest) -> set[str]:
    """`runs/test_x.py::test_name` of every test that `make test` runs."""
    if {(ROOT / word).resolve() for word in request.config.args} & {ROOT, ROOT / "tests"}:
        return request.config.stash[DEFAULT_TIER]
    # A part of the tests was asked for.
    words = ["--collect-only", "-q", "-m", "not slow", "-o", "addopts=", "-p", "no:cacheprovider"]
    run = [sys.executable, "-m", "pytest", *words, str(ROOT / "tests")]
    listed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stdout
    return {line.removeprefix("tests/").partition("[")[0] for line in listed.stdout.splitlines()}


def test_each_promise_is_proved_by_tests_of_the_default_tier(default_tier: set[str]) -> None:
    rows = re.findall(
        r"^\| (?!promise|code|-)(.+) \| (.+) \|$", (ROOT / "docs/promises.md").read_text(), re.MULTILINE
    )
    proofs = {promise: re.findall(r"`([^`]+)`", tests) for promise, tests in rows}
    assert len(proofs) >= 50
    assert [promise for promise, tests in proofs.items() if not tests] == []
    assert {test for tests in proofs.values() for test in tests} - default_tier == set()


def test_each_exit_code_is_among_the_promises() -> None:
    from ds_pretrain.core import errors

    codes = re.findall(r"^\| (\d+): ", (ROOT / "docs/promises.md").read_text(), re.MULTILINE)
    assert {int(code) for code in codes} == set(errors.EXIT_MEANINGS)


def test_each_field_problem_has_a_test_of_the_default_tier(default_tier: set[str]) -> None:
    numbers = re.findall(r"^\| P-(\d+) ", (ROOT / "docs/field-problems.md").read_text(), re.MULTILINE)
    assert [n for n in numbers if not any(f"::test_p{n}_" in test for test in default_tier)] == []
