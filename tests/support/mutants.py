"""Files as they come from other people's disks: damaged in transit, edited by hand, forged on purpose.

`damaged` works on bytes, whatever is in them; `forged` on what a JSON file holds. Both are drawn from a seed, so that a
case that fails can be made again from its number.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

DEEP = 100_000
TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?')
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")

# What may stand in the place of a number or a text; some are no JSON, or no TOML, and some are neither.
SPELLINGS = (
    b"0", b"-1", b"-0.0", b"1e308", b"1e999", b"-1e999", b"5e-324", b"nan", b"inf", b"-inf", b"NaN", b"Infinity",
    b"-Infinity", b"9223372036854775808", b"1" + b"0" * 400, b"9" * 5000, b"0.5", b"1.0", b"2", b"null", b"true",
    b"false", b"[]", b"{}", b"[[1]]", b'""', b'"1"', b'"nan"', b'"R"', b'"\\n"', b'"\\ud800"', b'"\\u0000"',
    b'"' + "größe".encode() + b'"', b'"../../etc/passwd"', b"1979-05-27", b"0x10",
)  # fmt: skip

Mutation = Callable[[bytes, Random], bytes]


# --- of bytes --------------------------------------------------------------------------------------------------------


def _flipped(content: bytes, draw: Random) -> bytes:
    made = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    return bytes(made)


def _typed(content: bytes, draw: Random) -> bytes:
    """Another character, as if somebody had hit a wrong key."""
    at = draw.randrange(len(content))
    return content[:at] + draw.choice(b'0123456789abcxyzRSP"{}[],:. -\n').to_bytes() + content[at + 1 :]


def _cut(content: bytes, draw: Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _begun_late(content: bytes, draw: Random) -> bytes:
    return content[draw.randrange(1, len(content)) :]


def _doubled(content: bytes, draw: Random) -> bytes:
    return content + content


def _overwritten(content: bytes, draw: Random) -> bytes:
    """A block of the disk that holds something else."""
    at, length = draw.randrange(len(content)), draw.choice((1, 16, 512))
    block = draw.choice((b"\0" * length, b"\xff" * length, draw.randbytes(length)))
    return content[:at] + block + content[at + length :]


def _lines(change: Callable[[list[bytes], int, int], None]) -> Mutation:
    def mutation(content: bytes, draw: Random) -> bytes:
        lines = content.splitlines(keepends=True)
        change(lines, draw.randrange(len(lines)), draw.randrange(len(lines)))
        return b"".join(lines)

    return mutation


def _swap(lines: list[bytes], one: int, other: int) -> None:
    lines[one], lines[other] = lines[other], lines[one]


def _token(pattern: re.Pattern[bytes], instead: Callable[[Random, bytes], bytes]) -> Mutation:
    def mutation(content: bytes, draw: Random) -> bytes:
        found = [*pattern.finditer(content)]
        if not found:
            return content + instead(draw, b"1")
        one = draw.choice(found)
        return content[: one.start()] + instead(draw, one[0]) + content[one.end() :]

    return mutation


def _swapped(content: bytes, draw: Random) -> bytes:
    """Two values have changed places."""
    found = [*TOKEN.finditer(content)]
    if len(found) < 2:
        return content + content
    one, other = sorted(draw.sample(found, 2), key=lambda match: match.start())
    between = content[one.end() : other.start()]
    return content[: one.start()] + other[0] + between + one[0] + content[other.end() :]


def _encoded(content: bytes, draw: Random) -> bytes:
    text = content.decode(errors="replace")
    return text.encode(draw.choice(("utf-16", "utf-32", "utf-16-le", "utf-8-sig", "cp037", "utf-7")))


DAMAGE: dict[str, Mutation] = {
    "flipped bits": _flipped,
    "a wrong key": _typed,
    "cut short": _cut,
    "begun late": _begun_late,
    "doubled": _doubled,
    "overwritten": _overwritten,
    "a line less": _lines(lambda lines, one, _: lines.pop(one) and None),
    "a line twice": _lines(lambda lines, one, other: lines.insert(other, lines[one])),
    "lines swapped": _lines(_swap),
    "another value": _token(TOKEN, lambda draw, _: draw.choice(SPELLINGS)),
    "another number": _token(NUMBER, lambda draw, _: draw.choice(SPELLINGS)),
    "a value renamed": _token(TOKEN, lambda draw, old: old[:1] + b"x" + old[1:]),
    "a number as text": _token(NUMBER, lambda draw, old: b'"' + old + b'"'),
    "a text without quotes": _token(TOKEN, lambda draw, old: old.strip(b'"') or b"0"),
    "values swapped": _swapped,
    "nested deep": _token(TOKEN, lambda draw, _: b"[" * (deep := draw.choice((200, 2000, DEEP))) + b"]" * deep),
    "tables nested deep": _token(TOKEN, lambda draw, _: b'{"a":' * (deep := draw.choice((200, 2000))) + b"}" * deep),
    "very long": _token(TOKEN, lambda draw, _: b'"' + b"x" * draw.choice((300, 100_000)) + b'"'),
    "another encoding": _encoded,
    "a key twice": _token(re.compile(rb'"\w+"\s*:\s*|\w+ = '), lambda draw, old: old + b"1, " + old),
}  # fmt: skip


def damaged(content: bytes, seeds: range) -> Iterator[tuple[str, bytes]]:
    """(what was done and the seed, the bytes) for each seed, one kind after the other."""
    kinds = [*DAMAGE]
    for seed in seeds:
        kind = kinds[seed % len(kinds)]
        yield f"{kind}, seed {seed}", DAMAGE[kind](content, Random(seed))


# --- of what a JSON file holds ---------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    0, -1, 1, 2, 7, 0.0, -0.0, 0.5, 1e308, 5e-324, 2**63, 10**400, -(2**70), "", "1", "R", "S0", "S1", "P", "Pmax",
    "R R", "S0 R", "R S0", "S1 R", "P R", "S0 S0", "data", "tensor", "float32[1]", "float32[4, 8]", "int64[]", "a\nb",
    "\ud800", "\x1b[2J", "x=__import__('os').abort()", "/etc/passwd", "/dev/zero.toml", "x" * 5000, None, True, False,
    [], {}, [0], ["x"], {"float": "nan"}, {"float": "inf"}, {"ref": "x"}, {"const": ["dtype", "load"]},
)  # fmt: skip


def _places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in inside:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from _places(value, (*path, key))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def _edited(document: Any, alike: list[tuple[Any, ...]], places: list[tuple[Any, ...]], draw: Random) -> str:
    """Change one of the values of one name (`alike`), and say how."""
    path = draw.choice(alike)
    holder, key = _at(document, path[:-1]), path[-1]
    what = draw.choice(("value", "value", "alike", "alike", "delete", "twice", "nudge"))
    match what:
        case "delete":
            del holder[key]
        case "twice" if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case "alike":  # what stands in another place of the same name: as a forger would have it
            holder[key] = copy.deepcopy(_at(document, draw.choice([p for p in alike if p != path] or places)))
        case "nudge" if type(holder[key]) in (int, float):
            holder[key] = draw.choice((holder[key] + 1, holder[key] * 2, -holder[key], holder[key] / 2))
        case _:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return f"{what} at {'.'.join(map(str, path))}"


def forged(document: Any, seed: int) -> tuple[str, Any]:
    """(what was done, the document) with one or two values changed, anywhere in it, or put in each other's place."""
    draw = Random(seed)
    document = copy.deepcopy(document)
    told: list[str] = []
    for _ in range(draw.choice((1, 1, 2))):
        places = [*_places(document)]
        by_name: dict[str, list[tuple[Any, ...]]] = {}
        for path in places:  # long lists of numbers are no more worth than single fields
            by_name.setdefault(".".join(part for part in path if isinstance(part, str)), []).append(path)
        told.append(_edited(document, by_name[draw.choice([*by_name])], places, draw))
    return f"{' and '.join(told)}, seed {seed}", document


# --- what a reader says ----------------------------------------------------------------------------------------------


def one_sentence(error: Exception, kinds: tuple[type[Exception], ...], case: str, name: str) -> None:
    """Assert that an error is one of these kinds, no other, and one line that names the file and can be printed."""
    told = str(error)
    assert type(error) in kinds, f"{case}: {type(error).__name__}: {told[:300]}"
    assert "\n" not in told and told.isprintable(), f"{case}: {told[:300]!r}"
    assert name in told and len(told) < 1200, f"{case}: {told[:700]}"
