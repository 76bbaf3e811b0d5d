"""Keeps secrets out of texts: names of variables that mean a secret, and texts scrubbed of their values."""

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import quote

HIDDEN = "[hidden]"
_SECRET = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|CONNECTION_STRING)(?:_|$)"
    r"|^FSSPEC_[A-Z0-9]+$"  # the options of a kind of store as one JSON text: keys may be among them
)
_SHORTEST = 4  # characters of a value worth hiding; shorter ones ("1", "yes") are no secrets
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@'\"]+@")
_QUERY_OF_URL = re.compile(r"(?<=://)([^?\s'\"]*)\?[^\s'\"<>)\]]+")
_SIGNED = re.compile(
    r"(?i)\b(X-Amz-[a-z-]+|AWSAccessKeyId|Signature|Credential|AccountKey|SharedAccessSignature|sig)"
    r"=[^\s&;,'\"<>)\]]+"
)
_AUTHORIZATION = re.compile(r"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?|bearer )[^'\",;\r\n]+")
_AWS_KEY_ID = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")


def is_secret(name: str) -> bool:
    """True for names of variables that look like keys and passwords."""
    return _SECRET.search(name.upper()) is not None


def scrub(text: str, secrets: Collection[str]) -> str:
    """`text` without credentials, whatever library wrote it.

    Hidden are `secrets` (at least the values of environment variables whose names look secret), what signs a
    URL, and users in URLs.
    """
    known = {value for found in secrets for value in _list_spellings(found)}
    for value in sorted(known, key=len, reverse=True):  # a secret may be part of another
        text = text.replace(value, HIDDEN)
    text = _USER_OF_URL.sub(f"{HIDDEN}@", text)
    text = _QUERY_OF_URL.sub(rf"\1?{HIDDEN}", text)
    text = _SIGNED.sub(rf"\1={HIDDEN}", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    return _AWS_KEY_ID.sub(HIDDEN, text)


def find_secret_options(options: Any, named_secret: bool = False) -> Iterator[str]:
    """The texts among nested options that stand under a name that looks secret."""
    if isinstance(options, dict):
        for name, value in options.items():
            yield from find_secret_options(value, named_secret or is_secret(str(name)))
    elif named_secret and isinstance(options, str):
        yield options


def _list_spellings(value: str) -> Iterator[str]:
    """A secret as it is and as it stands in a URL; of a JSON object, the secret texts in it."""
    candidates = [value]
    if value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):  # not JSON after all: then it is hidden as a whole only
            candidates += find_secret_options(json.loads(value))
    for candidate in candidates:
        if len(candidate.strip()) >= _SHORTEST:
            yield from (candidate, candidate.strip(), quote(candidate, safe=""))
