"""Parses pages of `dalijax.show`, and checks that they are self-contained."""

import base64
import html.parser
import io

import numpy as np
from PIL import Image


class Parsed(html.parser.HTMLParser):
    """The elements of a page: their tags and attributes, texts, images, and captions."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts, self.pictures, self.records = [], [], [], []
        self.in_caption = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.elements.append((tag, attrs))
        self.in_caption = tag == "figcaption"
        if self.in_caption:
            self.records.append("")
        if tag == "img":
            head, _, data = attrs["src"].partition(",")
            assert head == "data:image/png;base64"
            self.pictures.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))))

    def handle_data(self, data):
        self.texts.append(data)
        if self.in_caption:
            self.records[-1] += data

    def handle_endtag(self, tag):
        self.in_caption = False

    def classes(self, tag):
        return [attrs.get("class", "") for name, attrs in self.elements if name == tag]


def parsed(page):
    """Returns the page's elements, and checks that it loads no other files."""
    text = page.html
    found = Parsed(text)
    assert "http:" not in text and "https:" not in text
    assert "url(" not in text and "@import" not in text
    tags = {tag for tag, _ in found.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "a"}
    for _, attrs in found.elements:
        assert not {"href", "srcset", "data"} & {*attrs}
        assert attrs.get("src", "data:").startswith("data:")
        assert not [name for name in attrs if name.startswith("on")]
    assert "@media (prefers-color-scheme: dark)" in text
    assert ("meta", "width=device-width, initial-scale=1") in [
        (tag, attrs.get("content")) for tag, attrs in found.elements
    ]
    return found
