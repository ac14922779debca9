"""Keys and passwords out of what people read: reports, logs, the store, messages."""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"
SHOWN = frozenset({"api-version"})
"""Names in a URL's query whose values are shown. A key may have any name, so all others are hidden."""
SHORTEST = 4
"""Characters of a secret that is looked for in other people's words; shorter ones would hide half of them."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`]*")
# To the last @ of the host's part; to the last of all where a password holds slashes that nobody escaped.
# What begins with a number and a slash is a port.
_USER = re.compile(r"(?<=://)(?:([^/?#]*)|([^/?#@:]*:(?!\d{1,5}[/?#]).*))@", re.DOTALL)
_FIELD = re.compile(r"(?:([^&;=]*)=)?([^&;]+)")


def redacted(text: str) -> str:
    """`text` with its URLs' users, passwords, queries and fragments hidden.

    >>> redacted("https://me:pw@host:8000/v1?api-version=2&api_key=sk-1#x is no endpoint")
    'https://***@host:8000/v1?api-version=2&api_key=***#*** is no endpoint'
    """
    return _URL.sub(lambda found: _hide(found[0]), text)


def redacted_url(url: str) -> str:
    """One URL in the same way. Whoever knows that it is one, and no text with URLs in it, hides spaces and
    quotes too, which a text's URLs end at; what has no scheme is hidden whole, since a key may be anywhere.

    >>> redacted_url("http://host/v1?api_key=sk 'one'"), redacted_url("host/v1?api_key=sk-1")
    ('http://host/v1?api_key=***', '***')
    """
    return _hide(url) if "://" in url else HIDDEN * bool(url)


def secrets_of(url: str) -> list[str]:
    """What `redacted_url` hides of one URL, as it stands there and as it is meant, the longest first: to be
    hidden in the words of whoever got it.

    >>> secrets_of("https://host/v1?api-version=2&api_key=sk%2D1")
    ['sk%2D1', 'sk-1']
    """
    found: list[str | None] = []
    if user := _USER.search(url):
        name, _, password = (user[1] or user[2] or "").partition(":")
        found += [name, password]
        url = url[user.end() :]
    rest, _, fragment = url.partition("#")
    query = rest.partition("?")[2]
    found += [fragment, *(value for name, value in _FIELD.findall(query) if name not in SHOWN)]
    every = {text for one in found if one for text in (one, unquote(one))}
    return sorted((text for text in every if len(text) >= SHORTEST), key=lambda text: (-len(text), text))


def _hide(url: str) -> str:
    rest, sharp, fragment = _USER.sub(f"{HIDDEN}@", url, count=1).partition("#")
    rest, mark, query = rest.partition("?")
    return rest + mark + _FIELD.sub(_field, query) + sharp + (HIDDEN if fragment else "")


def _field(found: re.Match[str]) -> str:
    name = found[1]
    shown = found[2] if name in SHOWN else HIDDEN
    return shown if name is None else f"{name}={shown}"
