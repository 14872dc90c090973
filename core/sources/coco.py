"""`Coco`: images with boxes, labels and masks, annotated in COCO's format."""

from __future__ import annotations

import os
import posixpath
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names
from ..environment.extras import extra
from ..formats.byte_files import is_remote
from ..formats.coco import CocoTable
from ..formats.field import Field
from ..formats.image_headers import TURNED
from ..formats.image_size import look_at, look_at_file
from ..formats.names import Names
from ..formats.paths import Path, home_expanded, path_text
from ..messages.printable import printable, printable_text
from ..order.shuffle import Indices
from ..remote.folders import Folders
from ..remote.storage import Storage, open_storage
from .base import BaseSource
from .file_lists import LocalFolders, listed
from .files import Files
from .labels import CLASS_MASK, LABELS, class_names, class_numbers, few
from .record_table import RecordTable
from .source import Values

_MOST_IN_8_BITS = 254  # classes of a class mask of 8 bits: 0 is the background, 255 often ignored
_OBJECT_MASK = "object_mask"


class Coco(Files):
    """Images with boxes, labels and masks, annotated in the format of COCO's object instances.

    A record is an image, also if it has no objects. The records are sorted by image id, and the
    objects of a record are in the order of the annotation file. The fields are:

    - ``data``: the image file, as in `Files`.
    - ``boxes``: float32 [n, 4], the corners (x0, y0, x1, y1) in pixels, which is the default of
      `dalijax.augment.Window.boxes`. (The file has x, y, width and height.) [0, 4] without objects.
    - ``labels``: int32 [n], the number of each object's class, from 0; see ``classes``.
    - ``crowd``: bool [n], True for a group of objects (``iscrowd``), which COCO's evaluation
      ignores.
    - ``area``: float32 [n], in pixels; the area of the box if the file has no area.
    - ``image_id``: a scalar, int32, or int64 if an id does not fit.
    - ``image_size``: int32 [2], the height and width in the annotation file.
    - ``class_mask``, with ``masks=True``: [height, width], 0 for the background and k + 1 for
      class k; uint8, with more than 254 classes uint16. Of overlapping objects, the smaller object
      covers the larger object, and all objects cover crowds.
    - ``object_mask``, with ``masks=True``: int32 [height, width], k + 1 for object k, in the same
      manner.

    A field is only read if the graph takes it. Masks are drawn by pycocotools when they are read.

    An image whose size differs from the size in the annotation file is a bad record, since its
    boxes belong to another version of the image. Names of files are compared as in Unicode's
    normal form NFC, because macOS may store other bytes for a name than the annotation file has.

    Args:
        annotations: The path or URL of the annotation file, such as ``instances_train2017.json``.
        images: The directory or URL of the images, to which the file names in the annotation file
            are relative.
        masks: Whether records have masks. Requires pycocotools: ``pip install "dalijax[coco]"``.
        without_crowd: Whether to leave out the objects that are crowds.
        classes: Names of the categories in the order of their labels, or a source with ``classes``,
            such as the training data; None: the categories sorted by their ids.
        orientation: If "displayed", annotations refer to images as they are displayed, with EXIF
            orientation applied, as ``fn.decoders.image`` returns them. If "stored", they refer to
            the stored pixels: decode with ``adjust_orientation=False``.
        identity, storage_options, read_ahead, cache, cache_bytes: As for `Files`.

    Attributes:
        fields: Names and kinds of the fields.
        classes: Names of the categories in the order of their labels.
        category_ids: The id in the annotation file of each label, int64 [classes]; -1 for a name in
            ``classes=`` that is not in the file. `pycocotools` requires these ids.
        num_objects: The number of objects of each record, int64 [records]. To omit images without
            objects, write ``Selection(source, source.num_objects > 0)``.

    Raises:
        FileNotFoundError: If the annotation file, the directory or an image does not exist.
        ValueError: If the annotation file does not have the format, an id occurs twice, an
            annotation refers to an unknown image or category, several files fit a name, or
            ``classes`` lacks a category.
        ImportError: If ``masks`` is True, and pycocotools is not installed.
    """

    _for_lists = _for_files = "Extract archives, and pass the directory of the images"

    @knows_its_names
    def __init__(
        self,
        annotations: Path,
        images: Path,
        *,
        masks: bool = False,
        without_crowd: bool = False,
        classes: Any = None,
        orientation: str = "displayed",
        identity: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_ahead: int | str = "128MB",
        cache: Path | None = None,
        cache_bytes: int | float | str | None = None,
    ):
        if orientation not in ("displayed", "stored"):
            raise ValueError(f"orientation must be 'displayed' or 'stored', not {orientation!r}")
        if masks:
            _pycocotools()
        storage = open_storage(storage_options, read_ahead, cache, cache_bytes)
        self._begin(storage)
        lister = self._open_folder(images, storage)
        path = path_text(annotations)
        text = _text(path, storage)
        try:
            self._table = CocoTable.from_json(text, masks=masks, without_crowd=without_crowd)
        except ValueError as error:
            raise ValueError(f"{printable(path)}: {error}") from None
        del text  # it may have gigabytes
        self._names = Names([(b"", self._files(lister))])
        names = self._table.category_names
        self.classes = names if classes is None else class_names(classes)
        numbers = np.arange(len(names), dtype=np.int32)
        if classes is not None:
            numbers = class_numbers(names, self.classes, f"the categories of {printable(path)}")
        self.category_ids = np.full(len(self.classes), -1, np.int64)
        self.category_ids[numbers] = self._table.category_ids
        self.num_objects = np.diff(self._table.ends, prepend=0)
        self._object_labels = numbers[self._table.categories]
        self._is_stored = orientation == "stored"
        self._checked_sizes = RecordTable(len(self), 0)
        ids = self._table.image_ids
        self._image_ids = ids if np.abs(ids).max() >= 1 << 31 else ids.astype(np.int32)
        fields = {
            "data": self._open_files(storage),
            "boxes": Field(np.dtype(np.float32), 2),
            LABELS: Field(np.dtype(np.int32), 1),
            "crowd": Field(np.dtype(np.bool_), 1),
            "area": Field(np.dtype(np.float32), 1),
            "image_id": Field(self._image_ids.dtype),
            "image_size": Field(np.dtype(np.int32), 1),
        }
        if masks:
            is_small = len(self.classes) <= _MOST_IN_8_BITS
            fields[CLASS_MASK] = Field(np.dtype(np.uint8 if is_small else np.uint16), 2)
            fields[_OBJECT_MASK] = Field(np.dtype(np.int32), 2)
        # The identity contains the annotations of all records.
        self._described = {name: None for name in fields if name != "data"}
        BaseSource.__init__(self, fields, identity)

    def _files(self, lister: Folders | LocalFolders) -> list[bytes]:
        """Returns the names of the images' files, relative to the directory.

        Raises:
            FileNotFoundError: If files do not exist.
            ValueError: If several files or several images fit a name.
        """
        root = printable(lister.unstrip_protocol(os.fsdecode(self._root)))
        by_folder: defaultdict[str, list[int]] = defaultdict(list)
        names = [posixpath.normpath(name) for name in self._table.file_names]
        for number, name in enumerate(names):
            if name.startswith(("/", "../")):
                raise ValueError(
                    f"the file name {printable_text(name)!r} of image "
                    f"{self._table.image_ids[number]} is not in {root}. Pass the directory to "
                    "which the file names are relative as images="
                )
            by_folder[posixpath.dirname(name)].append(number)
        files: list[bytes] = [b""] * len(names)
        missing: list[int] = []
        for folder, numbers in by_folder.items():
            prefix = os.fsencode(posixpath.join(folder, ""))
            for number, file in zip(numbers, _matches(lister, self._root, prefix, numbers, names)):
                files[number] = file or b""
                if file is None:
                    missing.append(number)
        if missing:
            shown = few([names[number] for number in sorted(missing)])
            raise FileNotFoundError(
                f"{len(missing):,} of {len(names):,} images of the annotation file are not in "
                f"{root}: {shown}. Pass the directory to which the file names are relative as "
                "images="
            )
        first: dict[bytes, int] = {}
        for number, file in enumerate(files):
            other = first.setdefault(file, number)
            if names[other] != names[number]:
                raise ValueError(
                    f"the images {self._table.image_ids[other]} and "
                    f"{self._table.image_ids[number]} have file names that differ only in the "
                    f"encoding of characters, {names[other]!a} and {names[number]!a}, but only one "
                    f"file exists: {printable_text(os.fsdecode(file))}"
                )
        return files

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        columns: dict[str, Values] = {}
        if "data" in names:
            columns = super().read(indices, ["data"])
            if len(names) > 1:
                self._check_sizes(indices, columns["data"])
        ranges = [self._table.objects_of(index) for index in indices.tolist()]
        of_objects = {
            "boxes": self._table.boxes,
            LABELS: self._object_labels,
            "crowd": self._table.crowd,
            "area": self._table.area,
        }
        for name in names:
            if name in of_objects:
                columns[name] = [of_objects[name][objects].copy() for objects in ranges]
        if "image_id" in names:
            columns["image_id"] = self._image_ids[indices]
        if "image_size" in names:
            columns["image_size"] = self._table.sizes[indices]
        if CLASS_MASK in names or _OBJECT_MASK in names:
            masks = [self._object_mask(index) for index in indices.tolist()]
            if _OBJECT_MASK in names:
                columns[_OBJECT_MASK] = masks
            if CLASS_MASK in names:
                dtype = self.fields[CLASS_MASK].dtype
                columns[CLASS_MASK] = [
                    np.append(0, self._object_labels[objects] + 1).astype(dtype)[mask]
                    for objects, mask in zip(ranges, masks)
                ]
        return columns

    def _object_mask(self, index: int) -> NDArray[np.int32]:
        """Returns the field ``object_mask`` of a record.

        Raises:
            ValueError: If a segmentation is invalid.
        """
        table, coco = self._table, _pycocotools()
        height, width = table.sizes[index].tolist()
        objects = table.objects_of(index)
        mask = np.zeros((height, width), np.int32)
        order = np.lexsort((-table.area[objects], ~table.crowd[objects]))
        for k in order.tolist():
            shape = table.segmentation(objects.start + k)
            try:
                if isinstance(shape, dict) and isinstance(shape["counts"], str):
                    lengths = shape  # run lengths as text
                else:
                    lengths = coco.frPyObjects(shape, height, width)
                if isinstance(lengths, list):  # of several polygons
                    lengths = coco.merge(lengths)
                pixels = coco.decode(lengths)
                if pixels.shape != mask.shape:
                    raise ValueError(f"it has {pixels.shape} pixels instead of {mask.shape}")
                x, y, w, h = map(int, coco.toBbox(lengths))
                part = np.s_[y : y + h, x : x + w]  # faster than the whole mask
                np.copyto(mask[part], k + 1, where=pixels[part].view(np.bool_))
            except Exception as error:  # pycocotools raises many kinds of errors
                raise ValueError(
                    f"the segmentation of object {k} of {printable(self.name(index))} can't be "
                    f"drawn: {error!r}"
                ) from error
        return mask

    def _check_sizes(self, indices: Indices, data: Values) -> None:
        """Raises ValueError if an image has another size than its annotations.

        The size of most images is checked once per process.
        """
        is_checked, _ = self._checked_sizes.get(indices)
        rows = np.flatnonzero(~is_checked)
        if not len(rows):
            return
        images = [data[row] for row in rows.tolist()]
        sizes = self.sizes(indices[rows], "data", images)
        expected = self._table.sizes[indices[rows]]
        is_known = sizes[:, 0] >= 0  # DALI reports an error for the other images
        if self._is_stored:
            is_turned = np.array([self._is_turned(image) for image in images])
            sizes = np.where(is_turned[:, np.newaxis], sizes[:, ::-1], sizes)
        differs = is_known & (sizes != expected).any(axis=1)
        good = rows[~differs]
        self._checked_sizes.put(indices[good], np.empty((len(good), 0), np.int32))
        for k in np.flatnonzero(differs)[:1].tolist():
            (height, width), (annotated_height, annotated_width) = sizes[k], expected[k]
            cure = "The annotations belong to another version of the image"
            if (height, width) == (annotated_width, annotated_height) and self._is_turned(
                images[k]
            ):
                cure = (
                    "Its EXIF orientation turns it, and the annotations refer to the image as it "
                    "is displayed. Omit orientation='stored'"
                    if self._is_stored
                    else "Its EXIF orientation turns it, and the annotations refer to the stored "
                    "pixels. Pass orientation='stored', and decode with adjust_orientation=False"
                )
            raise ValueError(
                f"{printable(self.name(int(indices[rows[k]])))} has {height} x {width} pixels, but "
                f"its annotations are of {annotated_height} x {annotated_width}. {cure}"
            )

    def _is_turned(self, image: Any) -> bool:
        """Returns whether the EXIF orientation of an image swaps its height and width."""
        look = look_at_file if self.fields["data"].is_path else look_at
        return look(image).orientation in TURNED

    def _content(self) -> tuple[Any, ...]:
        """Returns the names and sizes of files, and the annotations, for the identity."""
        _, _, *of_files = super()._content()
        table = self._table
        names = [unicodedata.normalize("NFC", name) for name in table.file_names]
        arrays = (table.image_ids, table.sizes, table.ends, table.boxes, table.crowd, table.area)
        masks = (table.shapes, table.shape_ends) if CLASS_MASK in self.fields else ()
        return (
            *(names, *of_files, self.classes, self.category_ids, self._object_labels),
            *(*arrays, *masks, self._is_stored),
        )


def _text(path: str, storage: Storage) -> str:
    """Returns the text of a local or remote annotation file.

    Raises:
        OSError: If the file can't be read.
        ValueError: If it is not text.
    """
    try:
        if is_remote(path):
            return bytes(storage.contents([path], opens=True)[0]).decode("utf-8-sig")
        with open(home_expanded(path), encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{printable(path)} is not a JSON file in UTF-8: {error}") from None


def _matches(
    lister: Folders | LocalFolders,
    root: bytes,
    folder: bytes,
    numbers: Sequence[int],
    names: Sequence[str],
) -> list[bytes | None]:
    """Returns the files in a folder that have the names of some images; None for missing files.

    A file fits a name with equal bytes, otherwise a name with an equal normal form.

    Raises:
        ValueError: If several files fit a name.
    """
    try:
        found, _ = listed(lister, root + folder, ())
    except (FileNotFoundError, NotADirectoryError):
        found = []
    exact = {folder + name for name in found}
    by_form: defaultdict[str, list[bytes]] = defaultdict(list)
    matches: list[bytes | None] = []
    for number in numbers:
        name = os.fsencode(names[number])
        if name in exact:
            matches.append(name)
            continue
        if not by_form:
            for file in exact:
                by_form[unicodedata.normalize("NFC", os.fsdecode(file))].append(file)
        fitting = by_form.get(unicodedata.normalize("NFC", names[number]), [])
        if len(fitting) > 1:
            raise ValueError(
                f"the file name {names[number]!a} fits several files, which differ only in the "
                f"encoding of characters: {sorted(map(ascii, map(os.fsdecode, fitting)))}. Rename "
                "or remove all but one"
            )
        matches.append(fitting[0] if fitting else None)
    return matches


def _pycocotools() -> Any:
    """Returns the module ``pycocotools.mask``."""
    with extra("coco", "masks=True of dalijax.sources.Coco"):
        from pycocotools import mask
    return mask
