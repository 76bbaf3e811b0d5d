"""What a source is cut into, so that phases of any sequence length read it on."""

from collections.abc import Iterator, Mapping


def chunk_lengths(
    seq_lens: Mapping[str, int],
    weights: Mapping[str, Mapping[str, float]],
    declared: Mapping[str, int | None],
) -> dict[str, int]:
    """Tokens of a chunk of each source that a phase draws from: as declared, or its longest samples.

    `seq_lens` and `weights` are by phase.
    """
    longest: dict[str, int] = {}
    for phase, seq_len in seq_lens.items():
        for name in weights[phase]:
            longest[name] = max(seq_len, longest.get(name, 0))
    return {name: declared.get(name) or length for name, length in longest.items()}


def chunk_problems(
    seq_lens: Mapping[str, int],
    weights: Mapping[str, Mapping[str, float]],
    chunk_tokens: Mapping[str, int],
) -> list[str]:
    """Phases whose sequences do not cut a source's chunks into whole pieces."""
    return list(_chunk_problems(seq_lens, weights, chunk_tokens))


def _chunk_problems(
    seq_lens: Mapping[str, int],
    weights: Mapping[str, Mapping[str, float]],
    chunk_tokens: Mapping[str, int],
) -> Iterator[str]:
    for name, longest in chunk_lengths(seq_lens, weights, {}).items():
        used = {phase: length for phase, length in seq_lens.items() if name in weights[phase]}
        chunk = chunk_tokens[name]
        bad = [f"phases.{phase}.seq_len = {length:,}" for phase, length in used.items() if chunk % length]
        if not bad:
            continue
        declared = "" if chunk == longest else f"sources.{name}.chunk_tokens = {chunk:,} and "
        yield (
            f"{declared}{' and '.join(bad)}: sources.{name} is read in chunks of {chunk:,} tokens (its "
            f"phases take {_listed(used)}), which sequences of every phase must divide; choose lengths "
            "that divide one another, or give the phase a source of another name with the same path, which "
            "has an order of its own and repeats what was read under the first name"
        )


def changed_chunks(old: Mapping[str, int], new: Mapping[str, int | None]) -> list[str]:
    """Why a run cannot go on with other chunks; `old` holds the sources that something was read of.

    One that no phase draws from any more is not cut into anything: its mixtures tell what has changed.
    """
    return [
        f"sources.{name} was read in chunks of {old[name]:,} tokens, and would go on in chunks of "
        f"{tokens:,}: what was read would be read again, and other tokens left out; set "
        f"sources.{name}.chunk_tokens = {old[name]}"
        + (
            ""
            if tokens < old[name]
            else ", and give the phase with longer sequences a source of another name with the same path"
        )
        for name, tokens in new.items()
        if tokens is not None and name in old and tokens != old[name]
    ]


def _listed(used: Mapping[str, int]) -> str:
    return ", ".join(f"{phase} {length:,}" for phase, length in used.items())
