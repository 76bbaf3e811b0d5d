"""Files of an earlier format are refused, and the error names the format and what changed."""

import re
from pathlib import Path

import pytest

from ds_pretrain.checkpoint.manifest import UnknownVersion, parse_manifest
from ds_pretrain.config.loader import Section
from ds_pretrain.config.plan import parse_run
from ds_pretrain.config.schema import Run
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import RunState

FORMATS = Path(__file__).parent / "formats"


def test_a_run_state_of_the_first_format_is_refused_by_its_number() -> None:
    with pytest.raises(ValueError, match=r"run state of format 1, expected 3 \(.*num_skipped_updates"):
        RunState.from_json((FORMATS / "run_state_1.json").read_text())


def test_a_manifest_of_an_earlier_format_is_refused_by_its_number_and_is_not_broken() -> None:
    with pytest.raises(UnknownVersion, match=r"its manifest has format 2, expected 3 \(.*peak_lr"):
        parse_manifest((FORMATS / "manifest_2.json").read_text())


def test_a_run_file_with_the_first_keys_is_refused_with_the_new_name_of_each() -> None:
    with pytest.raises(InputError) as raised:
        parse_run((FORMATS / "run_1.toml").read_text(), (), "run.toml")
    found = dict(re.findall(r"unknown key `\S+?(\w+)`; it is now called `(\w+)`", str(raised.value)))
    renamed = {old: new for section in _sections(Run) for old, new in section.renamed.items()}
    assert found == {old: new for old, new in renamed.items() if old != "from"}  # a file has one or the other


def _sections(section: type[Section]) -> list[type[Section]]:
    from ds_pretrain.config.loader import find_section_models

    inner = [m for field in section.model_fields.values() for m in find_section_models(field.annotation)]
    return [section, *(s for m in inner if issubclass(m, Section) for s in _sections(m))]
