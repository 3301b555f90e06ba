"""Converts IPTC captions between their plain form (TIFF) and a Photoshop resource block (JPEG).

The other resources of that block, such as a thumbnail of the old image, are left out.
"""

import struct

_PHOTOSHOP, _RESOURCE, _IPTC = b"Photoshop 3.0\0", b"8BIM", 0x0404


def unwrap(block: bytes) -> bytes | None:
    """Returns the plain form; None if a Photoshop block has no captions."""
    if not block.startswith(_PHOTOSHOP):
        return block
    at = len(_PHOTOSHOP)
    while block[at : at + 4] == _RESOURCE and len(block) >= at + 12:
        number = struct.unpack(">H", block[at + 4 : at + 6])[0]
        # The name has a length byte; name and data are padded to an even length.
        at += 6 + (block[at + 6] + 2) // 2 * 2
        if len(block) < at + 4:
            return None
        length = struct.unpack(">I", block[at : at + 4])[0]
        if number == _IPTC:
            return block[at + 4 : at + 4 + length] or None
        at += 4 + (length + 1) // 2 * 2
    return None


def wrap(captions: bytes) -> bytes:
    """Returns the Photoshop block for a JPEG file."""
    head = _PHOTOSHOP + _RESOURCE + struct.pack(">HHI", _IPTC, 0, len(captions))
    return head + captions + b"\0" * (len(captions) % 2)
