"""Damage to files: what disks, copies, editors and people do to them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

#: what parsers stumble over
PIECES = (
    *(b"", b"\0", b"\n", b"\r\n", b"\t", b" ", b",", b":", b'"', b"'", b"#", b"\xef\xbb\xbf"),
    *(b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\\ud800", "é".encode(), b"\x1f\x8b", b"PK\x03\x04"),
    *(b"0", b"-1", b"1e400", b"-1e400", b"nan", b".nan", b"inf", b"1e-400", b"0x1p3", b"1_0"),
    *(b"9" * 9, b"9" * 19, b"9" * 30, b"9" * 5000, b"2147483648", b"true", b"null", b"~", b"1:1:1"),
    *(b"[" * 50, b"{" * 50, b"[" * 5000, b"[]", b"{}", b"- ", b"&a ", b"*a", b"<<: *a", b"!!set "),
    *(b"!!python/object/apply:os.system [x]", b"!!binary /w==", b"../../x", b"/etc/passwd"),
    b"x" * 300,
)


def mutated(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One of the files with some damage; now and then any bytes."""
    damaged = st.builds(_damaged, st.sampled_from(seeds), st.lists(_steps, min_size=1, max_size=4))
    return st.one_of(damaged, damaged, damaged, st.binary(max_size=200), _pieces)


_place = st.floats(0, 1)
_pieces = st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join)
_piece = st.sampled_from(PIECES) | st.binary(max_size=8)
_kinds = st.sampled_from(("cut", "flip", "head", "replace", "crlf", "drop", "copy", "move"))
_steps = st.tuples(_kinds, _place, _place, _piece)


def _damaged(content: bytes, steps: Sequence[tuple[str, float, float, bytes]]) -> bytes:
    for kind, first, second, piece in steps:
        at = int(first * len(content))
        lines = content.split(b"\n")
        row, other = (int(place * (len(lines) - 1)) for place in (first, second))
        if kind == "cut":
            content = content[:at]
        elif kind == "flip":
            flipped = bytes(byte ^ 1 << int(second * 7) for byte in content[at : at + 1])
            content = content[:at] + flipped + content[at + 1 :]
        elif kind == "head":
            content = piece + content
        elif kind == "replace":  # as many bytes, more or none
            content = content[:at] + piece + content[at + int(second * 20) :]
        elif kind == "crlf":
            content = content.replace(b"\n", b"\r\n")
        else:
            line = lines[row] if kind == "copy" else lines.pop(row)
            lines[other:other] = [line] * (kind != "drop")
            content = b"\n".join(lines)
    return content
