"""Plain text: parsing numbers, finding similar names, and printing safely (no control characters reach the terminal)."""

from __future__ import annotations

import codecs
import difflib
import logging
import math
import os
import re
import sys
from collections.abc import Iterable
from typing import TextIO

WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)", re.ASCII | re.IGNORECASE)
PLAIN = {"±": "+-", "·": "-", "…": "...", "–": "-", "×": "x", "≥": ">=", "≤": "<="}
"""ASCII spelling of characters, for output that is ASCII only"""


def whole(word: str) -> int:
    """A whole number in the digits 0 to 9. (`int` also takes 1_0 and the digits of other scripts.)"""
    if not WHOLE.fullmatch(word.strip(" \t\r\n")):
        raise ValueError(f"{word!r} is not a whole number")
    return int(word)


def number(word: str) -> float:
    """A number such as 4.5, -1 or 1e-3, or inf or nan."""
    if not NUMBER.fullmatch(word.strip(" \t\r\n")):
        raise ValueError(f"{word!r} is not a number")
    return float(word)


def is_number(value: object) -> bool:
    """Whether a value from a JSON file is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def shown(text: object, keep: str = "") -> str:
    """Text without control characters, escapes or marks that turn the direction of writing: each is spelt out, but those to `keep`."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in str(text))


def human(size: float) -> str:
    """A number of bytes: 999 B, 12 MB, 1.5 TB."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def say(text: object = "", file: TextIO | None = None) -> None:
    """Print without control characters. If standard output is closed (behind `head`), the rest is discarded."""
    try:
        print(shown(text, keep="\n\t"), file=file, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Up to three of the known words that look like this one, best first."""
    return difflib.get_close_matches(word.lower(), list(known), n=3, cutoff=0.6)


def loose(word: str) -> str:
    """A name without its capitals, hyphens and underscores: FedRec-MF and fedrec_mf are one, and so are ML-1M and ml_1m."""
    return re.sub(r"[\s_-]", "", word.lower())


def matching(word: str, known: Iterable[str]) -> str | None:
    """The one known name that equals this word if capitals, hyphens and underscores are ignored; None if there is none or several."""
    found = [name for name in known if loose(name) == loose(word)]
    return found[0] if len(found) == 1 else None


class Shown(logging.Filter):
    """Log filter that spells out control characters, so that no record can fake another line."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = shown(record.getMessage()), ()
        return True


def _spelt(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    return "".join(PLAIN.get(c) or ascii(c)[1:-1] for c in part), error.end


def prepare_output() -> None:
    """Make the standard streams safe to write to: closed ones go to /dev/null, ASCII-only ones spell out other characters."""
    for number_ in range(3):
        try:
            os.fstat(number_)
        except OSError:  # else the next file that is opened would get this number, and whatever is printed
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error("fedbench", _spelt)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for as long as the process lasts)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="fedbench")
    if logging.lastResort is not None and not logging.lastResort.filters:
        logging.lastResort.addFilter(Shown())
