"""Mutations of valid files: bytes anywhere, and values inside a format with its lengths and
checksums made right again.

Each takes a random.Random and the content, and returns another content. A mutation inside a format
reaches the code behind the checksum; one of bytes reaches the parser before it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Mutate = Callable[[random.Random, bytes], bytes]

POWERS = (1, 7, 8, 16, 31, 32, 63, 64)
WORDS = [0, 1] + [2**power - back for power in POWERS for back in (0, 1)]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 10**6, 10**9, 2**31, 2**63, 10**30, 10**400, 0.0, -0.5, 0.5,
    1e-320, 1e308, float("inf"), float("-inf"), float("nan"), "", "a", "1", "é\ud800",
    "../../etc/passwd", "../victim", "x" * 3000, [], [[]], {}, {"a": 1}, [1, "b"], ["1", "2"],
    [None], [0, 0], [1, 10**9], [10**9] * 3, {"": None}, {"a": {"b": [{}]}},
]  # fmt: skip
"""What a value is replaced by: other kinds, other signs, far too large, not finite."""
TOKENS = [
    b"NaN", b"Infinity", b"-1", b"1e999", b"99999999999999999999", b"null", b"[[[[", b"]", b"{",
    b"}", b'"', b"\\u0000", b"&a [*a]", b"*a", b"!!bool x", b"2001-99-99", b"0x" + b"f" * 500,
    b"!!python/object/apply:os.system [id]", b": ", b"- ", b"\n", b"\t", b"\xff\xfe", b"\x00",
    b"<<: *b", b"1:2:3:4", b"geometric:1000000000:50:0.01", b"none", b"%TAG",
]  # fmt: skip


def of_bytes(rng: random.Random, content: bytes) -> bytes:
    """A few changes of bytes: flipped, overwritten, cut out, repeated, inserted, cut off."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at, length = rng.randrange(len(changed) + 1), rng.choice([1, 2, 4, 8, 32, 200])
        kind = rng.randrange(8)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + 1] = bytes([rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])])
        elif kind == 2:
            form = rng.choice(["<I", ">I", "<Q", ">Q", "<H", ">H"])
            size = struct.calcsize(form)
            changed[at : at + size] = struct.pack(form, rng.choice(WORDS) & (256**size - 1))
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            changed[at:at] = changed[at : at + length] * rng.choice([1, 2, 50])
        elif kind == 5:
            changed[at:at] = rng.randbytes(length)
        elif kind == 6:
            changed[at:at] = rng.choice(TOKENS)
        else:
            del changed[at:]
    return bytes(changed)


def replaced(put: Callable[[Path], object]) -> Callable[[Path], None]:
    def mutate(file: Path) -> None:
        file.unlink()
        put(file)

    return mutate


def grown(file: Path) -> None:
    """Zeros at the end, which take no room on the disk."""
    os.truncate(file, 3 << 30)


KINDS_OF_FILE: dict[str, Callable[[Path], None]] = {
    "pipe": replaced(os.mkfifo),
    "device": replaced(lambda file: file.symlink_to("/dev/zero")),
    "folder": replaced(Path.mkdir),
    "link to nothing": replaced(lambda file: file.symlink_to("nothing")),
    "zeros at the end": grown,
    "zeros alone": lambda file: (file.write_bytes(b""), grown(file))[1],
}
"""What may stand in the place of a file."""


def of_numbers(rng: random.Random, content: bytes) -> bytes:
    """A number in a text replaced by another."""
    places = list(re.finditer(rb"-?\d+(\.\d+)?(e-?\d+)?", content))
    if not places:
        return of_bytes(rng, content)
    place = rng.choice(places)
    value = json.dumps(rng.choice(VALUES)).encode()
    return content[: place.start()] + value + content[place.end() :]


def of_value(rng: random.Random, value: Any) -> Any:
    """A value with one change somewhere inside: replaced, removed, moved, wrapped or repeated."""
    inner = [*value] if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = [*range(len(value))]
    if inner and rng.random() < 0.8:
        key = rng.choice(inner)
        changed: Any = dict(value) if isinstance(value, dict) else list(value)
        kind = rng.randrange(12)
        if kind == 0:
            del changed[key]
        elif kind == 1 and isinstance(value, dict):
            changed[rng.choice(["", "a", str(key) + "s", str(key)[:-1]])] = changed.pop(key)
        elif kind == 2 and isinstance(value, list):
            changed *= rng.choice([2, 3, 100])
        elif kind == 3:
            changed[key] = value[rng.choice(inner)]
        else:
            changed[key] = of_value(rng, value[key])
        return changed
    if isinstance(value, int | float) and rng.random() < 0.2:
        return str(value)
    if rng.random() < 0.02:
        for _ in range(rng.choice([5, 100, 900])):
            value = [value]
        return value
    return rng.choice(VALUES)


def of_json(rng: random.Random, content: bytes) -> bytes:
    if rng.random() < 0.3:
        return of_lines(rng, content)
    value = json.loads(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        value = of_value(rng, value)
    return json.dumps(value).encode()


def of_json_lines(rng: random.Random, content: bytes) -> bytes:
    lines = content.splitlines()
    if rng.random() < 0.4 or not lines:
        return of_bytes(rng, content)
    at = rng.randrange(len(lines))
    lines[at] = of_json(rng, lines[at])
    return b"\n".join(lines) + b"\n"


def of_yaml(rng: random.Random, content: bytes) -> bytes:
    if rng.random() < 0.5:
        return of_lines(rng, content)
    return json.dumps(of_value(rng, yaml.safe_load(content))).encode() + b"\n"  # which is YAML too


def of_card(rng: random.Random, content: bytes) -> bytes:
    """Markdown with YAML at its top."""
    if rng.random() < 0.3:
        return of_bytes(rng, content)
    _, front, rest = content.split(b"---\n", 2)
    return b"---\n" + of_yaml(rng, front) + b"---\n" + rest


def of_safetensors(rng: random.Random, content: bytes) -> bytes:
    """Another header of the right length, numbers that are not finite, or bytes."""
    size = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + size], bytearray(content[8 + size :])
    kind = rng.randrange(4)
    if kind == 0:
        return of_bytes(rng, content)
    if kind == 1 and len(data) >= 8:
        at = rng.randrange(0, len(data) - 7, 4)
        number = rng.choice([float("nan"), float("inf"), -1.0, 500.0, 1e38, 0.0])
        data[at : at + 4] = struct.pack("<f", number)
    else:
        header = of_json(rng, header)
    return struct.pack("<Q", len(header)) + header + bytes(data)


def sometimes_bytes(mutate: Mutate) -> Mutate:
    """A mutation inside a format, or one of its bytes."""

    def either(rng: random.Random, content: bytes) -> bytes:
        return (of_bytes if rng.random() < 0.3 else mutate)(rng, content)

    return either


def in_zip(inner: Callable[[str], Mutate]) -> Mutate:
    """A member of a zip mutated by what `inner` gives for its name; or bytes."""

    @sometimes_bytes
    def mutate(rng: random.Random, content: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = rng.choice(list(members))
        kind = rng.randrange(12)
        if kind == 0:
            del members[name]
        elif kind == 1:
            others = ["../" + name, "/" + name, name + "x", "é", "a/" * 300 + "b"]
            members[rng.choice(others)] = members.pop(name)
        elif kind == 2:
            members[name] = members[rng.choice(list(members))]
        else:
            members[name] = inner(name)(rng, members[name])
        target = io.BytesIO()
        method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
        with zipfile.ZipFile(target, "w", method) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return target.getvalue()

    return mutate


def in_gzip(inner: Mutate) -> Mutate:
    return sometimes_bytes(
        lambda rng, content: gzip.compress(inner(rng, gzip.decompress(content)), 1)
    )


def in_tar(inner: Mutate) -> Mutate:
    """A member of a tar mutated, its name or kind changed; or bytes of the tar."""

    @sometimes_bytes
    def mutate(rng: random.Random, content: bytes) -> bytes:
        target = io.BytesIO()
        with (
            tarfile.open(fileobj=io.BytesIO(content)) as source,
            tarfile.open(fileobj=target, mode="w") as mutated,
        ):
            members = source.getmembers()
            name = rng.choice(members).name
            for member in members:
                stream = source.extractfile(member)
                data = stream.read() if stream else b""
                if member.name == name and rng.random() < 0.7:
                    data = inner(rng, data)
                elif member.name == name:
                    member.type = rng.choice([*b"1256"]).to_bytes()  # links, a folder, a pipe
                    member.linkname = "/etc/passwd"
                member.size = len(data) if member.isfile() else 0
                mutated.addfile(member, io.BytesIO(data))
        return target.getvalue()

    return mutate


KINDS_OF_NUMBERS = rb"<f8 >f4 <f2 |O |b1 <c8 <U3 |V4 <M8[s] |u1 <i4 <u2 |S9 x".split()


@sometimes_bytes
def of_npy(rng: random.Random, content: bytes) -> bytes:
    """Another header of the right length, or bytes."""
    size = struct.unpack("<H", content[8:10])[0]
    header, data = content[10 : 10 + size], content[10 + size :]
    if rng.random() < 0.5:
        header = re.sub(rb"(?<=descr': ')[^']*", rng.choice(KINDS_OF_NUMBERS), header)
    else:
        header = of_lines(rng, header)
    return content[:8] + struct.pack("<H", len(header) & 0xFFFF) + header + data


def of_png(rng: random.Random, content: bytes) -> bytes:
    """A chunk mutated and its checksum right, or bytes."""
    if rng.random() < 0.4 or not content.startswith(b"\x89PNG"):
        return of_bytes(rng, content)
    chunks, at = [], 8
    while at + 8 <= len(content):
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        chunks.append((kind, content[at + 8 : at + 8 + size]))
        at += 12 + size
    i = rng.randrange(len(chunks))
    if rng.random() < 0.2:
        chunks.insert(i, rng.choice(chunks))
    else:
        chunks[i] = chunks[i][0], of_bytes(rng, chunks[i][1])
    mutated = content[:8]
    for kind, data in chunks:
        check = struct.pack(">I", zlib.crc32(kind + data))
        mutated += struct.pack(">I", len(data)) + kind + data + check
    return mutated


OPCODES = [
    b"r\xff\xff\xff\x7f", b"cos\nsystem\n", b"(", b"t", b"R", b"}", b"]", b"s", b"u", b"e", b"2",
    b"0", b"1", b".", b"h\x00", b"j\xff\xff\xff\x00", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"T\xff\xff\xff\x7f", b"cbuiltins\neval\n", b"b", b"\x81", b"L99999999999999999999L\n",
    b"I01\n", b"N", b"K\x07", b"\x85", b"\x86", b"Vabc\n", b"\x94", b"Q", b"P1\n", b"\x82\x01",
]  # fmt: skip


def of_pickle(rng: random.Random, content: bytes) -> bytes:
    """Opcodes put in or taken out, or bytes."""
    if rng.random() < 0.5 or not content:
        return of_bytes(rng, content)
    at = rng.randrange(len(content))
    return content[:at] + rng.choice(OPCODES) + content[at + rng.choice([0, 0, 1, 2]) :]


def of_lines(rng: random.Random, content: bytes) -> bytes:
    return rng.choice([of_bytes, of_numbers])(rng, content)
