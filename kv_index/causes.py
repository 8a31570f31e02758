"""How two texts that should be the same differ: by a time, by an id, in whitespace, or in words.

A time or an id is to blame only where everything around it is equal: both texts are cut into words and times, and all pairs
that differ must be of that kind. What is equal is not looked at, so a difference in a long text costs little more than
finding it. How much of what differs is looked at has a bound for the whole comparison (`Effort`), for it runs beside requests.
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

LONGEST = 16 * 1024
"""Characters of one differing line that are looked at: a longer one was edited."""
AROUND = 256
"""Characters of a line that are looked at on both sides of what differs: no value is as long."""


LINES = 8192
"""Lines of one text that are looked at."""
MOST = 64 * 1024
"""Steps of one comparison: a character that is looked at is one, ..."""
WORD = 10
"""... a word so many more, ..."""
EQUAL = 8
"""... and of characters that are only read so many are one."""
TEXT = 96
"""What a text costs beyond that."""
ENOUGH = 8
"""Values that are of one kind, after which all are believed to be, where not all can be looked at."""
SEEN = 64
"""Characters in front of a word that tell what it is."""


class Effort:
    """What one comparison may still spend. Beyond it a cause is the coarser one; where prompts differ is right all the same."""

    __slots__ = ("explained", "left", "out")

    def __init__(self, steps: int = MOST) -> None:
        self.left = steps
        self.out = False
        """Something was left out."""
        self.explained = 0
        """Values that differ and were found to be times or ids."""

    def take(self, steps: int) -> bool:
        """Whether so many more may be spent; they are, then."""
        if self.out or steps > self.left:
            self.out = True
            return False
        self.left -= steps
        return True

    @property
    def enough(self) -> bool:
        """Whether so much was looked at that the rest, which cannot be, is taken for the same."""
        return self.out and self.explained >= ENOUGH


class Cause(StrEnum):
    """Why a prompt does not begin with the one before it."""

    TIME = "time"
    ID = "random_id"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    REWRITTEN = "history_rewritten"
    COMPACTED = "history_compacted"
    THINKING = "thinking_stripped"
    PARAMETERS = "parameters_changed"
    WHITESPACE = "whitespace"
    """Only whitespace, or the form in which the same number is written."""
    OTHER = "other"


class Difference(NamedTuple):
    """Where two texts differ first, and why."""

    cause: Cause | None
    """`Cause.TIME`, `Cause.ID` or `Cause.WHITESPACE`; ``None``: words differ."""
    at: int
    """The first character that differs; as long as the shorter text if the other one goes on."""
    start: int
    """Where the value begins that differs; ``at`` if it is none."""


def common(one: str, other: str) -> int:
    """Leading characters that both have."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _common_end(one: str, other: str, most: int) -> int:
    """Trailing characters that both have, at most ``most``."""
    if not most or one[-most:] == other[-most:]:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if one[-middle:] == other[-middle:]:
            low = middle
        else:
            high = middle
    return low


def difference(before: str, after: str, effort: Effort | None = None) -> Difference | None:
    """How ``after`` differs from ``before``; ``None`` if it does not."""
    if before == after:
        return None
    effort = effort or Effort()
    at = common(before, after)
    end = _common_end(before, after, min(len(before), len(after)) - at)
    begin = before.rfind("\n", 0, at) + 1
    # One character on both sides tells whether words are parted there.
    around = [text[max(0, at - 1) : len(text) - max(0, end - 1)] for text in (before, after)]
    read = sum(map(len, around)) // EQUAL
    if effort.take(TEXT) and 2 * read <= effort.left and effort.take(read) and around[0].split() == around[1].split():
        return Difference(Cause.WHITESPACE, at, at)
    one, other = (_to_line_end(text, begin, len(text) - end) for text in (before, after))
    cause, start = None, at
    for value in _values(one, other, effort):
        if value is None:
            if cause is not None and effort.enough:
                break
            return Difference(None, at, at)
        if cause is None:
            cause, start = value[0], begin + value[1]
    return Difference(cause, at, start)


def _to_line_end(text: str, begin: int, end: int) -> str:
    """``text`` from ``begin`` to the end of the line in which ``end`` is."""
    found = text.find("\n", end)
    return text[begin:] if found < 0 else text[begin:found]


def _values(one: str, other: str, effort: Effort) -> Iterator[tuple[Cause, int] | None]:
    """(cause, offset) of the first value in each line that differs; ``None`` for one in which words differ."""
    if one.count("\n") != other.count("\n"):
        # No time and no id has a line's end in it.
        yield None
        return
    offset = 0
    pairs = zip(one.split("\n", LINES), other.split("\n", LINES), strict=True)
    for number, (line, fellow) in enumerate(pairs):
        if line != fellow:
            # The last one of too many is all the others.
            effort.out = effort.out or number == LINES
            value = _in_line(line, fellow, effort)
            yield None if value is None else (value[0], offset + value[1])
        offset += len(line) + 1


def _words(text: str, effort: Effort) -> list[re.Match[str]] | None:
    """The line in words and times; ``None``: it is too much."""
    if not effort.take(len(text)):
        return None
    most = effort.left // WORD
    found = list(islice(_WORDS.finditer(text), most + 1))
    return found if effort.take(len(found) * WORD) else None


def _in_line(one: str, other: str, effort: Effort) -> tuple[Cause, int] | None:
    at = common(one, other)
    end = _common_end(one, other, min(len(one), len(other)) - at)
    begin = max(0, at - AROUND)
    one, other = (text[begin : len(text) - max(0, end - AROUND)] for text in (one, other))
    if max(len(one), len(other)) > LONGEST:
        return None
    ones = _words(one, effort)
    others = None if ones is None else _words(other, effort)
    if ones is None or others is None or len(ones) != len(others):
        return None
    found, strong, weak = None, False, False
    for left, right in zip(ones, others, strict=True):
        if left[0] == right[0]:
            continue
        if left.lastgroup == right.lastgroup == "time":
            cause, strong = Cause.TIME, True
        elif left.lastgroup == right.lastgroup == "weak" and _COUNTER.search(_in_front(left, left.start())) is None:
            cause, weak = Cause.TIME, True
        elif left.lastgroup == "rest" or right.lastgroup == "rest":
            return None
        elif _dated(left[0], right[0]):
            cause, strong = Cause.TIME, True
        elif _is_id(left, right):
            cause, strong = Cause.ID, True
        else:
            return None
        effort.explained += 1
        found = found or (cause, begin + left.start() + _folders(left[0], right[0]))
    if weak and not strong and not _NOW.search(one):
        return None
    return found


_GAP = r"\s{1,9}"
"""Within a time: not any number of them, which were counted again and again."""
_MONTH = (
    r"(?:jan(?:uary|uar|vier|eiro)?|feb(?:ruary|ruar|rero)?|février|fevereiro|mar(?:ch|s|zo|ço)?|märz|apr(?:il|ile)?|avril|abril"
    r"|may|mai|mayo|maio|june?|juni|juin|junio|junho|july?|juli|juillet|julio|julho|aug(?:ust)?|août|agosto"
    r"|sept?(?:ember|embre|iembre)?|setembro|oct(?:ober|obre|ubre)?|okt(?:ober)?|outubro|nov(?:ember|embre|iembre|embro)?"
    r"|dec(?:ember)?|dez(?:ember|embro)?|décembre|diciembre)\.?"
)
_DAY = (
    r"(?:mon(?:day|tag)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:rs(?:day)?)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?"
    r"|dienstag|mittwoch|donnerstag|freitag|samstag|sonntag|lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche"
    r"|lunes|martes|miércoles|jueves|viernes|sábado|domingo)"
)
_EAST = r"(?:\s?[(（]?(?:星期|周)[一二三四五六日天][)）]?|\s?[(（][月火水木金土日][)）])"
_ZONE = r"(?:\s?(?:z|utc|gmt|cet|cest|eet|eest|wet|west|bst|est|edt|cst|cdt|mst|mdt|pst|pdt|ist|jst|aest|aedt)\b)?"
_CLOCK = (
    r"(?:\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:\s?[ap]\.?m\b\.?)?|\d{1,2}\s?[ap]m\b|\d{1,2}h\d{2}|\d{1,2}\s(?:o'clock|uhr)\b"
    rf"|\d{{1,2}}\s?[时時시](?:\s?\d{{1,2}}\s?[分분])?(?:\s?\d{{1,2}}\s?[秒초])?){_ZONE}(?:\s?[+-]\d{{2}}:?\d{{2}})?"
)
_NTH = r"\d{1,2}(?:st|nd|rd|th|\.)?"
_DATE = (
    r"(?:\d{4}-\d{1,2}-\d{1,2}|\d{4}/\d{1,2}/\d{1,2}|\d{4}\.\d{1,2}\.\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d{1,2}\.\d{1,2}\.\d{4}"
    rf"|\d{{2}}-\d{{2}}-(?:\d{{4}}|\d{{2}})|\d{{1,2}}[-/]{_MONTH}[-/]\d{{4}}|\d{{4}}-?w\d{{2}}(?:-?\d)?|\d{{1,2}}/(?:19|20)\d{{2}}"
    rf"|{_MONTH}{_GAP}{_NTH}(?:,?{_GAP}\d{{4}})?|{_NTH}{_GAP}(?:of{_GAP}|de{_GAP})?{_MONTH}(?:,?{_GAP}(?:de{_GAP})?\d{{4}})?|{_MONTH},?{_GAP}\d{{4}}"
    rf"|\d{{4}}\s?[年년]\s?\d{{1,2}}\s?[月월](?:\s?\d{{1,2}}\s?[日일])?{_EAST}?"
    r"|(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:t?\d{4,6}(?:\.\d+)?z?)?)"
)
_TIME = (
    rf"{_DAY},?{_GAP}{_MONTH}{_GAP}\d{{1,2}},?{_GAP}{_CLOCK}{_GAP}\d{{4}}"
    rf"|(?:{_DAY},?{_GAP})?{_DATE}(?:{_EAST})?(?:(?:t|_|:|,?{_GAP}(?:at{_GAP}|à{_GAP}|um{_GAP})?){_CLOCK})?(?:,?{_GAP}\(?{_DAY}\)?)?"
    rf"|(?:{_DAY},?{_GAP}(?:at{_GAP})?)?{_CLOCK}(?:,?{_GAP}(?:on{_GAP})?(?:{_DAY},?{_GAP})?{_DATE})?"
    r"|1\d{9}(?:\.\d{1,9})?|1\d{12}(?:\.\d{1,6})?|1\d{15}|1\d{18}"
    r"|\d+\s?(?:ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|weeks?)\s{1,9}ago"
)
_WEAK = r"(?:19|20)\d{2}|(?:mon|tues|wednes|thurs|fri|satur|sun)day|(?:星期|周)[一二三四五六日天]"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_WORDS = re.compile(
    rf"(?<![a-z0-9_])(?:(?P<uuid>{_UUID})|(?P<time>{_TIME})|(?P<weak>{_WEAK}))(?![a-z0-9_])"
    r"|(?P<word>[+/]?[a-z0-9_]+(?:[-+/]+[a-z0-9_]+)*[+/]?={0,2})|(?P<rest>[^a-z0-9_]+?(?=[+/]?[a-z0-9_]|星期|周|\Z))",
    re.IGNORECASE | re.DOTALL,
)
"""A line is cut into these. A year or the name of a day is no time by itself: it may be part of what was said."""
_INSIDE = re.compile(rf"(?<![a-z0-9])(?:{_TIME})(?![a-z0-9])", re.IGNORECASE)
"""A time as part of a word."""
_NOW = re.compile(
    r"\b(?:today|now|current|currently|date|time|day|year|yesterday|tomorrow|copyright)\b|[©今年]|日期|时间|现在", re.I
)
"""Words by which it is one."""
_COUNTER = re.compile(
    r"(?:(?:\b|_)(?:request|req|turn|attempt|iteration|session|run|job|build|seq|sequence|counter|nonce|seed|trace|ticket|usage"
    r"|pid|id)(?:[\s_-]+(?:id|no\.?|nr\.?|number))?|#|\bnumber|\bno\.)[\s:=#\"'_-]{0,4}\Z",
    re.IGNORECASE,
)
"""What stands before a number that counts requests."""
_LEFT = re.compile(
    r"\s?(?:tokens?|requests?|messages?|turns?|seconds?)?\s+(?:left|remaining|remain|used|so far)\b", re.IGNORECASE
)
"""What stands behind one."""
_KEY = re.compile(r"(?:nonce|(?:\b|_)id|uuid|guid|cch|hash|digest|checksum|etag|trace|span|salt)[\s:=\"']{1,4}\Z", re.I)
"""What stands before a word that is an id whatever it looks like."""
_SEPARATOR = re.compile(r"[-_/+=:]")
_HEX = re.compile(r"[0-9a-f]{6,}|[0-9A-F]{6,}")
_TEMPORARY = re.compile(r"(?:tmp|temp)[._-]?[A-Za-z0-9_]{6,}")
_CLASSES = re.compile(r"[0-9]+|[a-z]+|[A-Z]+")
_CODED = re.compile(r"[A-Za-z0-9_+/=-]+")


def _dated(one: str, other: str) -> bool:
    """Whether two words, names of files it may be, are the same but for the time in them."""
    left, right = _INSIDE.search(one), _INSIDE.search(other)
    if left is None or right is None:
        return False
    return (one[: left.start()], one[left.end() :]) == (other[: right.start()], other[right.end() :])


def _in_front(word: re.Match[str], at: int) -> str:
    """The last characters in front of ``at``."""
    return word.string[max(0, at - SEEN) : at]


def _folders(one: str, other: str) -> int:
    """Characters before the value in a path or an assignment."""
    same = common(one, other)
    return max(one.rfind("/", 0, same), one.rfind("=", 0, same)) + 1


def _is_id(left: re.Match[str], right: re.Match[str]) -> bool:
    """Whether two words that differ are values of an id, or of a counter."""
    if left.lastgroup == right.lastgroup == "uuid":
        return True
    one, other = left[0], right[0]
    if _both_random(one, other):
        return True
    begin = max((each.end() for each in _SEPARATOR.finditer(one, 0, common(one, other))), default=0)
    ones, others = one[begin:], other[begin:]
    end = _common_end(ones, others, min(len(ones), len(others)) - common(ones, others))
    cut = _SEPARATOR.search(ones, len(ones) - end)
    if cut is not None:
        kept = len(ones) - cut.start()
        ones, others = ones[:-kept], others[:-kept]
    before = _in_front(left, left.start() + begin)
    if _TEMPORARY.fullmatch(ones) and _TEMPORARY.fullmatch(others):
        return True
    if ones.isdecimal() and others.isdecimal():
        if min(len(ones), len(others)) >= 7:
            return True
        return _COUNTER.search(before) is not None or _LEFT.match(left.string, left.end()) is not None
    if len(one) == len(other) >= 4 and _KEY.search(_in_front(left, left.start())) is not None:
        return True
    return _both_random(ones, others)


def _both_random(one: str, other: str) -> bool:
    if _HEX.fullmatch(one) and _HEX.fullmatch(other) and abs(len(one) - len(other)) <= 2:
        together = one + other
        return any(map(str.isdigit, together)) and not together.isdecimal()
    if _CODED.fullmatch(one) is None or _CODED.fullmatch(other) is None:
        return False
    if len(one) == len(other):
        return _random(one) or _random(other)
    return _random(one) and _random(other)


def _random(word: str) -> bool:
    """Whether letters and digits come in it as in no word that somebody wrote."""
    if len(word) < 6:
        return False
    runs = _CLASSES.findall(word)
    digits = any(map(str.isdigit, word))
    if digits and len(runs) >= 4 and (len(word) >= 20 or not _SEPARATOR.search(word)):
        return len(runs) * 4 >= len(word)
    if _SEPARATOR.search(word):
        return any(map(_random, _SEPARATOR.split(word)))
    mixed = len(word) >= 16 and word.lower() != word and word.upper() != word
    return mixed and len(runs) * 3 >= len(word)
