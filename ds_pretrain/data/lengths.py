"""How long prompts with a hidden key are, and where buckets of positions end: known without torch."""

MARKER_TOKENS, KEY_TOKENS = 4, 8
SHORTEST_PROMPT = 4 * (
    MARKER_TOKENS + KEY_TOKENS
)  # tokens: marker and key stand in it twice, the rest is text


def doublings(seq_len: int) -> list[int]:
    """1, 2, 4, ..., `seq_len`: where buckets of positions end, and how long prompts are."""
    return [2**power for power in range(seq_len.bit_length()) if 2**power < seq_len] + [seq_len]


def prompt_lengths(seq_len: int) -> list[int]:
    """The lengths of prompts for samples of `seq_len` tokens: none where these are too short."""
    return [n for n in doublings(seq_len) if n >= SHORTEST_PROMPT]
