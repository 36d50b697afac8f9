"""Records, frames and their codec: the one format of the WAL, of the stream to the backend and of a run on
disk.
"""

from gyre_sdk.wire.codec import (
    FRAME_HEADER_BYTES,
    Frame,
    decode,
    decode_payload,
    encode,
    encode_payload,
    frame_bytes,
    iter_frames,
    next_frame,
    pack_floats,
    pack_ids,
    payload_kind,
    unpack_floats,
    unpack_ids,
)
from gyre_sdk.wire.files import (
    FILE_HEADER_BYTES,
    WalReader,
    WalReport,
    check_file_header,
    file_header,
    repair,
    verify,
)

__all__ = [
    "FILE_HEADER_BYTES",
    "FRAME_HEADER_BYTES",
    "Frame",
    "WalReader",
    "WalReport",
    "check_file_header",
    "decode",
    "decode_payload",
    "encode",
    "encode_payload",
    "file_header",
    "frame_bytes",
    "iter_frames",
    "next_frame",
    "pack_floats",
    "pack_ids",
    "payload_kind",
    "repair",
    "unpack_floats",
    "unpack_ids",
    "verify",
]
