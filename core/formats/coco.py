"""Reads annotation files in COCO's format into arrays."""

from __future__ import annotations

import dataclasses
import json
import marshal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..messages.printable import printable_repr

_LISTS = ("images", "annotations", "categories")
_IMAGE_KEYS = ("id", "file_name", "width", "height")
_OBJECT_KEYS = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
_MOST_SHOWN = 3  # ids in an error
_MOST_PIXELS = (1 << 31) - 1  # of a height or width
_LIMIT = 1 << 63  # of integers
_MARSHAL = 2  # the last version whose bytes are equal for equal values


@dataclasses.dataclass(frozen=True)
class CocoTable:
    """The images, objects and categories of an annotation file in COCO's format.

    Images are sorted by their ids, categories by their ids, and objects by image, then as in the
    file.

    Attributes:
        file_names: The file name of each image.
        image_ids: int64 [images].
        sizes: Height and width of each image, int32 [images, 2].
        ends: The end of each image's objects in the arrays of objects, int64 [images].
        category_ids: int64 [categories].
        category_names: The name of each category.
        boxes: (x0, y0, x1, y1) in pixels, float32 [objects, 4].
        categories: The index of each object's category, int64 [objects].
        crowd: Whether each object is a crowd, bool [objects].
        area: Area in pixels, float32 [objects].
        shapes: The segmentations of all objects, as bytes, if they were requested.
        shape_ends: The end of each object's segmentation in ``shapes``, int64 [objects].
    """

    file_names: tuple[str, ...]
    image_ids: NDArray[np.int64]
    sizes: NDArray[np.int32]
    ends: NDArray[np.int64]
    category_ids: NDArray[np.int64]
    category_names: tuple[str, ...]
    boxes: NDArray[np.float32]
    categories: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float32]
    shapes: bytes
    shape_ends: NDArray[np.int64]

    @staticmethod
    def from_json(text: str, *, masks: bool, without_crowd: bool) -> CocoTable:
        """Returns the table of an annotation file.

        Args:
            text: The content of the file.
            masks: Whether to keep the segmentations.
            without_crowd: Whether to leave out crowds.

        Raises:
            ValueError: If the text is not such a file; the message names the image, the category or
                the annotation that is wrong.
        """
        images, objects, categories = _lists(text, masks)
        image_ids, image_order = _ids(images, "image")
        category_ids, category_order = _ids(categories, "category")
        images = [images[k] for k in image_order.tolist()]
        categories = [categories[k] for k in category_order.tolist()]
        sizes = np.stack([_numbers(images, "image", key) for key in ("height", "width")], axis=1)
        is_strange = ((sizes < 1) | (sizes > _MOST_PIXELS)).any(axis=1)
        if is_strange.any():
            row = int(np.argmax(is_strange))
            name = _named(images[row], "image", row)
            raise ValueError(f"{name} has the height and width {sizes[row].tolist()}")
        rows = _places(objects, "image_id", image_ids, "images")
        crowd = _numbers(objects, "annotation", "iscrowd", (int, bool), lambda _: 0) != 0
        order = np.argsort(rows, kind="stable")
        if without_crowd:
            order = order[~crowd[order]]
        objects, rows = [objects[k] for k in order.tolist()], rows[order]
        boxes = _boxes(objects)
        lengths = np.fromiter((len(item.get("segmentation", b"")) for item in objects), np.int64)
        return CocoTable(
            file_names=_texts(images, "image", "file_name"),
            image_ids=image_ids,
            sizes=sizes.astype(np.int32),
            ends=np.cumsum(np.bincount(rows, minlength=len(images))),
            category_ids=category_ids,
            category_names=_texts(categories, "category", "name"),
            boxes=np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1).astype("f4"),
            categories=_places(objects, "category_id", category_ids, "categories"),
            crowd=crowd[order],
            area=_numbers(objects, "annotation", "area", (int, float), _area_of_box).astype(
                np.float32
            ),
            shapes=b"".join(item.get("segmentation", b"") for item in objects),
            shape_ends=np.cumsum(lengths),
        )

    def objects_of(self, image: int) -> slice:
        """Returns the range of an image's objects in the arrays of objects."""
        return slice(int(self.ends[image - 1]) if image else 0, int(self.ends[image]))

    def segmentation(self, number: int) -> Any:
        """Returns the segmentation of an object: polygons, or a dict with run lengths."""
        start = int(self.shape_ends[number - 1]) if number else 0
        return marshal.loads(self.shapes[start : self.shape_ends[number]])


def _area_of_box(item: dict[str, Any]) -> float:
    return float(item["bbox"][2] * item["bbox"][3])


def _lists(text: str, masks: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the images, annotations and categories of a file, as dicts with the used keys."""

    def reduced(values: dict[str, Any]) -> dict[str, Any]:
        """Omits other keys of a dict at once, because they need gigabytes for a large file."""
        if "image_id" in values:
            item = {key: values[key] for key in _OBJECT_KEYS if key in values}
            if masks:
                item["segmentation"] = marshal.dumps(values.get("segmentation"), _MARSHAL)
            return item
        if "file_name" in values:
            return {key: values[key] for key in _IMAGE_KEYS if key in values}
        return values

    try:
        content = json.loads(text, object_hook=reduced)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    keys = sorted(content) if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or any(not isinstance(content.get(k), list) for k in _LISTS):
        raise ValueError(
            f"it must be a JSON object with the lists {list(_LISTS)}, but it has "
            f"{printable_repr(keys, 200)}. Pass the file of COCO's object instances, such as "
            "instances_train2017.json"
        )
    images, objects, categories = (content[key] for key in _LISTS)
    if not images:
        raise ValueError("it has no images")
    return images, objects, categories


def _named(item: Any, kind: str, number: int) -> str:
    """Returns how errors name an image, an annotation or a category."""
    if isinstance(item, dict) and "id" in item:
        return f"the {kind} with the id {printable_repr(item['id'], 30)}"
    return f"{kind} {number}"


def _numbers(
    items: Sequence[Any],
    kind: str,
    key: str,
    types: tuple[type, ...] = (int,),
    default: Callable[[dict[str, Any]], float] | None = None,
) -> NDArray[Any]:
    """Returns the number at a key of each item: int64, or float64 if ``types`` contain float.

    Args:
        items: The images, annotations or categories.
        kind: The name of an item, for errors.
        key: The key.
        types: The types of valid numbers.
        default: Returns the value of an item without the key; None: the key is required.

    Raises:
        ValueError: If a number is missing or of another type.
    """
    values = []
    for number, item in enumerate(items):
        value: Any = item.get(key) if isinstance(item, dict) else None
        if value is None and default is not None:
            value = default(item)
        if type(value) not in types or not -_LIMIT < value < _LIMIT:
            raise ValueError(
                f"{_named(item, kind, number)} has {key}={printable_repr(value, 60)}. It must be "
                f"{'a number' if float in types else 'an integer'}"
            )
        values.append(value)
    return np.array(values, np.float64 if float in types else np.int64)


def _texts(items: Sequence[Any], kind: str, key: str) -> tuple[str, ...]:
    """Returns the text at a key of each item; raises ValueError if a text is missing or empty."""
    for number, item in enumerate(items):
        if not isinstance(item.get(key), str) or not item[key]:
            raise ValueError(
                f"{_named(item, kind, number)} has {key}={printable_repr(item.get(key), 60)}. It "
                "must be a text"
            )
    return tuple(item[key] for item in items)


def _ids(items: Sequence[Any], kind: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the sorted ids of images or categories, and the order that sorts the items.

    Raises:
        ValueError: If an id is not an integer, or two items have the same id.
    """
    ids = _numbers(items, kind, "id")
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    repeated = np.flatnonzero(ids[1:] == ids[:-1])
    if len(repeated):
        first = int(repeated[0])
        pair = [
            printable_repr(items[k].get("file_name", items[k].get("name")), 60)
            for k in order[first : first + 2].tolist()
        ]
        raise ValueError(
            f"the {kind} id {ids[first]} occurs more than once: for {pair[0]} and {pair[1]}. Give "
            f"each {kind} its own id"
        )
    return ids, order


def _places(
    objects: Sequence[Any], key: str, ids: NDArray[np.int64], kind: str
) -> NDArray[np.int64]:
    """Returns the index in sorted ids of the id that each object refers to, int64 [objects].

    Raises:
        ValueError: If an object refers to an id that does not exist.
    """
    wanted_ids = _numbers(objects, "annotation", key)
    places = np.searchsorted(ids, wanted_ids)
    is_missing = np.append(ids, -1)[places] != wanted_ids if len(ids) else places == 0
    is_missing |= places == len(ids)
    if is_missing.any():
        row = int(np.argmax(is_missing))
        missing = np.unique(wanted_ids[is_missing])
        shown = ", ".join(map(str, missing[:_MOST_SHOWN].tolist()))
        more = f" and {len(missing) - _MOST_SHOWN:,} more" * (len(missing) > _MOST_SHOWN)
        raise ValueError(
            f"{int(is_missing.sum()):,} annotations refer to {key}s that are not in {kind!r}: "
            f"{shown}{more}, such as {_named(objects[row], 'annotation', row)}. Add them, or "
            "remove the annotations"
        )
    return places.astype(np.int64)


def _boxes(objects: Sequence[Any]) -> NDArray[np.float64]:
    """Returns the boxes of objects as (x, y, width, height), float64 [objects, 4].

    Raises:
        ValueError: If a box is not 4 numbers.
    """
    for number, item in enumerate(objects):
        box = item.get("bbox")
        is_box = isinstance(box, list) and len(box) == 4
        if not is_box or not all(type(value) in (int, float) for value in box):
            raise ValueError(
                f"{_named(item, 'annotation', number)} has bbox={printable_repr(box, 60)}. It must "
                "be 4 numbers, as in COCO's object instances"
            )
    return np.array([item["bbox"] for item in objects], np.float64).reshape(-1, 4)
