"""A process that owns buffers and publishes a snapshot. Commands on stdin, one per line; a JSON line answers
each.

    publish VERSION | scribble | withdraw | stop
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import numpy as np

from gyre_backend.weights import Publisher, make_transport, region_of_array


def main() -> None:
    """argv: transport, folder, bytes per buffer, buffers, delta (0 or 1)."""
    kind, folder, size, count, delta = (
        sys.argv[1],
        Path(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5] == "1",
    )
    arrays = [np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8).view(np.float32) for i in range(count)]
    regions = [region_of_array(f"w{i}", array) for i, array in enumerate(arrays)]
    transport = make_transport(kind, folder=folder)
    publisher = Publisher(transport, delta=delta)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "publish":
            version = int(arguments[0])
            for array in arrays:
                array[:: max(1, array.size // 50)] = version
            manifest = publisher.publish(regions, version)
            print(json.dumps({"manifest": base64.b64encode(manifest.to_bytes()).decode()}), flush=True)
        elif command == "scribble":
            arrays[-1].view(np.uint8)[-1] ^= 1
            print("{}", flush=True)
        elif command == "withdraw":
            publisher.withdraw()
            print("{}", flush=True)
        else:
            break
    transport.close()


if __name__ == "__main__":
    main()
