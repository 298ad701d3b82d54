"""Secrets that say by themselves what they are, wherever they stand: keys of known services,
private keys, Bearer, users and passwords in addresses.
"""

from __future__ import annotations

import base64
import re

from ampscope.secret_names import is_secret, words_of

MASK = "***"
Taken = list[str]  # the secrets that a mask has taken the place of

# Of Hugging Face, GitHub, GitLab, OpenAI and others, AWS, Google, Slack, Stripe, npm, PyPI, Docker,
# SendGrid, Replicate, Groq; JSON web tokens.
_KEYS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|gl(?:pat|ptt|dt|rt|soat)-[\w-]{16,}|sk-[\w-]{20,}|[rs]k_(?:live|test)_\w{16,}"
    r"|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|xox[abeoprs]-[\w-]{10,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|r8_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{30,}|eyJ[\w-]{10,}\.eyJ[\w-]+\.[\w-]+)"
)
_PRIVATE_KEY = re.compile(
    r"(?s)-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}-----|$)"
)
# 40 hexadecimal digits are a commit more often than a key of W&B's: only right behind its name.
_OF_WANDB = re.compile(
    r"(?i)(\bwandb\b(?:[ .]?(?:login|api|key|relogin|--)){0,3}[\"'\s(=:,]{1,4})[0-9a-f]{40}\b"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)([ \t]+)([^\s\"',;]+)")
_NO_BEARER = {"token", "tokens", "auth", "authentication", "authorization", "scheme"}
_NO_BEARER = {"token", "tokens", "auth", "authentication", "authorization", "scheme"}
_ADDRESS = re.compile(r"(?<![\w+.-])[A-Za-z0-9][\w+.-]*://(?P<rest>[^\s\"'<>]+)")
# Of an argument: one that begins with an address is one to its end.
WHOLE_ADDRESS = re.compile(
    r"(?s)(?:(?P<whole>\A(?:-{0,2}[\w.-]+=)?)|(?<![\w+.-]))[A-Za-z0-9][\w+.-]*://"
    r"(?P<rest>(?(whole).+|\S+))"
)
_NEXT_ADDRESS = re.compile(r"([,;|\[\](){}=&?#/\s][A-Za-z][\w+.-]*://)")  # within one
_QUERY = re.compile(r"([?&#;])([\w.%-]+)=((?:(?!&[\w.%-]+=)[^\s#\"'<>])+)")
_OF_QUERY = {"sig", "signature"}  # signed addresses of Azure and AWS


def mask_of(secret: str) -> str:
    """What takes its place. A program's lines stay where they are."""
    return MASK + "\n" * secret.count("\n")


def known_forms(text: str, taken: Taken | None = None, address: re.Pattern[str] = _ADDRESS) -> str:
    """``text`` without what is known by its form alone, which is added to ``taken``."""
    found: Taken = [] if taken is None else taken

    def key(match: re.Match[str]) -> str:
        found.append(match[0])
        return mask_of(match[0])

    def bearer(match: re.Match[str]) -> str:
        kind, value = match[1].lower(), match[3]
        if value.lower() in _NO_BEARER or value.startswith((MASK, "{", "%", "$", "<")):
            return match[0]
        if len(value) < 4 or (kind == "basic" and not _is_basic(value)):
            return match[0]
        found.append(value)
        return f"{match[1]}{match[2]}{MASK}"

    def located(match: re.Match[str]) -> str:
        return match[0][: -len(match["rest"])] + _without_credentials(match["rest"], found)

    if "://" in text:
        text = address.sub(located, text)
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(key, text)
    return _BEARER.sub(bearer, _OF_WANDB.sub(rf"\1{MASK}", _KEYS.sub(key, text)))


def _is_basic(value: str) -> bool:
    """``user:password`` in base64, as it stands behind "Basic"; "basic fp16" is a run's name."""
    plain = value.rstrip("=.:)")
    try:
        return b":" in base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        return False


def _without_credentials(rest: str, taken: Taken) -> str:
    """What stands behind ``://``, without users and without secrets in the query."""

    def of_query(found: re.Match[str]) -> str:
        if not (is_secret(found[2]) or _OF_QUERY & set(words_of(found[2]))):
            return found[0]
        taken.append(found[3])
        return f"{found[1]}{found[2]}={MASK}"

    parts = _NEXT_ADDRESS.split(rest)
    for number, part in enumerate(parts):
        end = _end_of_user(part)
        user, words = part[: max(end, 0)], part[: max(end, 0)].split()
        if end < 0 or (len(words) > 1 and ":" not in words[0]):
            continue  # a blank may be in a password alone
        if user != MASK:
            taken += [user, user.partition(":")[2]]
        parts[number] = MASK + part[end:]
    return _QUERY.sub(of_query, "".join(parts))


def _end_of_user(rest: str) -> int:
    """Where ``user:password`` ends, -1 where there is none. A password that was not quoted for an
    address may hold ``@`` and ``/``."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    last, at = rest.rfind("@"), host.rfind("@")
    if at >= 0:
        behind = host[at + 1 :]
        is_host = "." in behind or ":" in behind or behind == "localhost"
        return at if is_host or ":" not in host[:at] else last
    user, colon, port = host.partition(":")
    if last < 0 or not colon or user.startswith("["):
        return -1
    is_port = port.isdigit() and ("." in user or user == "localhost")
    return -1 if is_port else last
