"""The worker process of `multimodal.image_loader`: decodes and preprocesses images.

A job is two messages: SIZE or PIXELS, then a file. The reply is {"size": [height, width]} or {"reason": ...}.
After the size come the pixels, for PIXELS only. For SIZE, the size is the header's, before EXIF rotation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

from PIL import Image

from foreword.multimodal.decode import ImageError, decode, read_size
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.limits import MediaLimits
from foreword.workers.worker import serve

SIZE: Final = b"size"
PIXELS: Final = b"pixels"
MAX_COMMAND_BYTES: Final = 16


def start(setup: tuple[ImageProcessor, MediaLimits]) -> Callable[[Connection], None]:
    """Returns the handler of jobs."""
    processor, limits = setup
    Image.preinit()  # imports Pillow's plugins: later, no file can be opened

    def handle(connection: Connection) -> None:
        command = connection.recv_bytes(MAX_COMMAND_BYTES)
        data = connection.recv_bytes(limits.max_bytes)
        pixels = None
        try:
            if command == SIZE:
                size = read_size(data, limits.max_pixels)
            else:
                image = decode(data, limits.max_pixels)
                size, pixels = (image.height, image.width), processor.to_pixels(image)
        except ImageError as error:
            reply: dict[str, object] = {"reason": str(error)}
        except MemoryError:
            reply = {"reason": "it takes too much memory to preprocess"}
        else:
            reply = {"size": size}
        connection.send_bytes(json.dumps(reply).encode())
        if pixels is not None:
            connection.send_bytes(pixels)

    return handle


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
