"""Where a picture of a request is."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ImageSource"]


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One picture: either its address or its file.

    where  the field of the request that names it, for errors, such as messages[0].content[1].image_url.url
    url    data:, http:, https: or file:
    data   bytes of a PNG, JPEG, WebP or GIF file
    """

    where: str
    url: str | None = field(default=None, repr=False)
    data: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert (self.url is None) != (self.data is None), "an address or a file"
