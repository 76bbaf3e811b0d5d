"""The kinds of values in a run file: durations with their units, sizes, names, folders."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator

from ds_pretrain.config.paths import folder_text, path_text, place_text
from ds_pretrain.config.schedule import RateRule
from ds_pretrain.config.timeline import Duration, Unit, parse_batch_tokens, parse_duration
from ds_pretrain.core.text import shown


def _duration(*units: Unit, may_be_zero: bool = False) -> PlainValidator:
    """A validator that reads a duration in one of `units`."""

    return PlainValidator(lambda value: _read_duration(value, units, may_be_zero))


def _read_duration(value: Any, units: Sequence[Unit], may_be_zero: bool) -> Duration:
    duration = value if isinstance(value, Duration) else parse_duration(_text(value))
    if duration.unit not in units:
        raise ValueError(f'"{duration}" is in {duration.unit}; expected {" or ".join(units)}')
    if duration.amount == 0 and not may_be_zero:
        raise ValueError(f'"{duration}" is zero; expected more')
    return duration


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f'{shown(value)} has no unit; write it as text with one, like "2000 steps"')
    return value


def _optional_weight(value: Any) -> Any:
    return None if value in (0, False, "off", "none") else value


def _rule(value: Any) -> Any:
    return "none" if value is None else value  # what an override's `none` is read as


def as_tuple(value: Any) -> Any:
    """A list of TOML as what is frozen."""
    return tuple(value) if isinstance(value, list) else value


def _one_or_more(value: Any) -> Any:
    return as_tuple(value) if isinstance(value, list | tuple) else (value,)


_START = replace(parse_duration("0 steps"), text="0")


def _ramp(value: Any) -> tuple[tuple[Duration, int], ...]:
    """{ "0" = "1M", "10B tokens" = "2M" }: from when on, and how many tokens a step."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f'{shown(value)} is not a ramp; expected {{ "0" = "1M", "10B tokens" = "2M" }}')
    steps = [
        (_START if start.strip() == "0" else parse_duration(start), parse_batch_tokens(tokens))
        for start, tokens in value.items()
    ]
    if wrong := [start for start, _ in steps if start.unit not in ("steps", "tokens")]:
        raise ValueError(f'"{wrong[0]}" is in {wrong[0].unit}; expected steps or tokens')
    if steps[0][0].amount != 0:
        raise ValueError(f'a ramp begins with "0"; its first key is "{steps[0][0]}"')
    return tuple(steps)


def _ramp_text(ramp: Any) -> Any:
    return ramp and {str(start): tokens for start, tokens in ramp}


Ramp = Annotated[tuple[tuple[Duration, int], ...], PlainValidator(_ramp), PlainSerializer(_ramp_text)]
Length = Annotated[Duration, _duration("steps", "tokens"), PlainSerializer(str)]
Share = Annotated[Duration, _duration("steps", "tokens", "percent", may_be_zero=True), PlainSerializer(str)]
ShareOfRun = Annotated[Duration, _duration("steps", "tokens", may_be_zero=True), PlainSerializer(str)]
Trigger = Annotated[Duration, _duration("steps", "tokens", "seconds"), PlainSerializer(str)]
Triggers = Annotated[tuple[Trigger, ...], BeforeValidator(_one_or_more)]


def _share_or_phase(value: Any) -> Duration | str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", value):
        return value
    return _read_duration(value, ("steps", "tokens", "percent"), may_be_zero=True)


ShareOrPhase = Annotated[Duration | str, PlainValidator(_share_or_phase), PlainSerializer(str)]
BatchTokens = Annotated[int, BeforeValidator(parse_batch_tokens)]
Interval = Annotated[Duration, _duration("seconds"), PlainSerializer(str)]
FilePath = Annotated[str, AfterValidator(path_text)]
HostFolder = Annotated[str, AfterValidator(folder_text)]
Place = Annotated[str, AfterValidator(place_text)]  # a folder, or a URL
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Fraction01 = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Rule = Annotated[RateRule, BeforeValidator(_rule)]
OptionalWeight = Annotated[Positive | None, BeforeValidator(_optional_weight)]  # 0, false, "off": None
Count = Annotated[int, Field(gt=0, le=10**12)]
Weight = Annotated[float, Field(gt=0, le=1e12)]  # so that a sum of them is finite
