"""Recognizes boxes, points, masks and patches, and the images that they belong to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...augment.geometry import FORMATS, BoxForm
from .contents import Annotation, Contents, Output
from .layouts import CLASSES, PATCHES, PICTURES, patch_shape
from .pixels import Brightness, brightness
from .placing import class_numbers, rows_of, size_of

# The last word of a name, such as "gt_boxes" or "objects/bbox".
_WORDS = {
    "masks": ("masks", "mask", "segmentation", "segmentations", "heatmap", "heatmaps"),
    "boxes": ("boxes", "box", "bboxes", "bbox"),
    "points": ("points", "keypoints", "landmarks"),
    "patches": ("patches",),
}
_FORMS = {"masks": "[height, width]", "boxes": "[n, 4]", "points": "[n, 2]"}
_LABELS = ("labels", "label", "classes", "class", "categories", "category")
_NORMALIZED = 2  # coordinates in pixels are larger
_WHITE = 255  # often the class to ignore


def annotated(
    contents: Contents,
    chosen: Mapping[str, str | None],
    format: str | None = None,
    classes: Sequence[str] = (),
) -> Contents:
    """Returns the contents of a batch with the annotations of its images.

    Args:
        contents: The contents of the batch.
        chosen: Names of outputs by "masks", "boxes" and "points". Kinds without a name are
            recognized by the names and shapes of outputs.
        format: Format of the boxes; None: "xyxy", unless a box contradicts it.
        classes: Names of the classes of all labels and masks.

    Raises:
        ValueError: If an argument is invalid, or no output has the classes.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format must be one of {FORMATS}, not {format!r}")
    roles = _roles(contents.outputs, chosen)
    if format is not None and "boxes" not in roles.values():
        names = sorted(output.name for output in contents.outputs)
        raise ValueError(
            f"format={format!r} is the format of boxes, but no output has the name and the shape "
            f"of boxes. Pass boxes= with one of the names {names}"
        )
    outputs = {o.name: _with_role(o, roles.get(o.name)) for o in contents.outputs}
    if classes:
        _add_classes(outputs, tuple(classes))
    images = [
        o.name
        for o in outputs.values()
        if o.layout in (*PICTURES, "encoded") and o.name not in roles and len(o.samples)
    ]
    notes: list[str] = []
    over: dict[tuple[str, str], list[str]] = {}  # names of outputs by image and kind
    for name, kind in roles.items():
        fitting = _best(images, _split(name)[0])
        if kind in _FORMS and len(fitting) == 1:
            over.setdefault((fitting[0], kind), []).append(name)
        elif kind in _FORMS and fitting:
            notes.append(f"{name}: not drawn, because it fits {' and '.join(fitting)}")
    for (image, kind), candidates in over.items():
        same = [name for name in candidates if _split(name)[0] == _split(image)[0]]
        if len(candidates) > 1 and len(same) != 1:
            text = " and ".join(candidates)
            notes.append(f"{text}: not drawn over {image}; choose one of them with {kind}=")
            continue
        name = candidates[0] if len(candidates) == 1 else same[0]
        annotation = _annotation(kind, outputs[name], outputs, format or "xyxy")
        if doubt := _doubt(annotation, outputs[image], format is None):
            notes.append(f"{name}: not drawn over {image}, because {doubt}")
            continue
        notes.append(f"{name}: over {image}{_interpretation(annotation)}")
        drawn = [*outputs[image].annotations, annotation]
        outputs[image] = dataclasses.replace(outputs[image], annotations=drawn)
        if annotation.labels is not None:
            labels = dataclasses.replace(annotation.labels, layout="labels")
            outputs[labels.name] = labels
    return dataclasses.replace(contents, outputs=[*outputs.values()], notes=notes)


def _add_classes(outputs: dict[str, Output], classes: Sequence[str]) -> None:
    """Adds the names of classes to all labels and masks.

    Raises:
        ValueError: If there are none.
    """
    named = [o for o in outputs.values() if o.layout == CLASSES or _split(o.name)[1] in _LABELS]
    if not named:
        raise ValueError(
            "the batch has no labels or masks for classes=. Pass classes={name: [...]}, with the "
            f"name of one of the outputs {sorted(outputs)}"
        )
    for output in named:
        outputs[output.name] = dataclasses.replace(output, classes=classes)


def _interpretation(annotation: Annotation) -> str:
    """Returns the format and the unit of boxes, or the unit of points."""
    if annotation.kind == "masks":
        return ""
    unit = "in shares of its size" if annotation.form.normalized else "in pixels"
    return f", as {annotation.form.format}, {unit}" if annotation.kind == "boxes" else f", {unit}"


def _split(name: str) -> tuple[str, str]:
    """Returns the first words of a name with their separator, and the last word."""
    cut = max(name.rfind(separator) for separator in "/_.") + 1
    return name[:cut], name[cut:].lower()


def _best(images: Sequence[str], prefix: str) -> list[str]:
    """Returns the images whose names fit the first words of an annotation's name best.

    For example, "left_image" fits "left_". Otherwise short names, and the word "image", are best.
    """

    def rank(name: str) -> tuple[bool, bool, bool]:
        first, word = _split(name)
        return first != prefix, first != "", word not in ("image", "images")

    return [name for name in images if rank(name) == min(map(rank, images))]


def _are_numbers(output: Output, kinds: str) -> bool:
    """Returns whether an output has samples, all of which are arrays of a kind of dtype."""
    samples = output.samples
    are_numbers = all(isinstance(s, np.ndarray) and s.dtype.kind in kinds for s in samples)
    return are_numbers and len(samples) > 0


def _fits(output: Output, kind: str, sizes: set[tuple[int, ...]]) -> bool:
    """Returns whether the samples of an output have the shape of a kind of annotation."""
    if kind == "masks" and output.layout == "encoded":
        return all(class_numbers(sample) is not None for sample in output.samples)
    if not _are_numbers(output, "biuf" if kind == "masks" else "iuf"):
        return False
    shape = output.samples[0].shape
    if kind == "boxes":
        return 1 <= len(shape) <= 2 and shape[-1] == 4
    if kind == "patches":
        return patch_shape(shape) is not None
    if kind == "masks":
        is_plane = output.layout == "HW" or (output.layout in PICTURES and 1 in shape[::2])
        return is_plane or (len(shape) == 3 and shape[1:] in sizes)
    if not 1 <= len(shape) <= 3 or shape[-1] not in (2, 3):
        return False
    # The third number is the visibility, as in COCO, and not a coordinate.
    return shape[-1] == 2 or all(np.isin(s[..., 2], (0, 1, 2)).all() for s in output.samples)


def _roles(outputs: Sequence[Output], chosen: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the kinds of annotations by the names of their outputs.

    Raises:
        ValueError: If a chosen output does not exist, or has another shape.
    """
    colored = [o for o in outputs if o.layout in ("HWC", "CHW") and len(o.samples)]
    sizes: set[tuple[int, ...]] = {size for o in colored if (size := size_of(o, 0)) is not None}
    roles: dict[str, str] = {}
    for kind, words in _WORDS.items():
        if name := chosen.get(kind):
            candidates = [o for o in outputs if o.name == name]
        else:
            candidates = [o for o in outputs if _split(o.name)[1] in words]
        fitting = [o.name for o in candidates if _fits(o, kind, sizes)]
        if name and not candidates:
            names = sorted(o.name for o in outputs)
            raise ValueError(f"{[name]} are not outputs of the batch, which has {names}")
        if name and not fitting:
            raise ValueError(
                f"{kind}={name!r} must have numbers of shape {_FORMS[kind]} in each sample, not "
                f"{candidates[0].dtype} {list(candidates[0].shape)}"
            )
        roles |= dict.fromkeys(fitting, kind)
    return roles


def _with_role(output: Output, kind: str | None) -> Output:
    """Returns an output with the layout of its kind."""
    figures = output.figures
    if kind in ("boxes", "points"):
        return dataclasses.replace(output, layout=kind, brightness=None)
    if kind == "patches" and figures is not None:
        drawn = brightness(output.samples[0].dtype, figures.least, figures.most)
        return dataclasses.replace(output, layout=PATCHES, brightness=drawn)
    if kind == "masks" and _has_classes(output):
        least, most = (0, _WHITE) if figures is None else (figures.least, figures.most)
        rule = "a color for each number; 0 is black" + ", 255 is white" * (most == _WHITE)
        rule += ", negative numbers are white" * (least < 0)
        white = _WHITE if most <= _WHITE else math.inf
        return dataclasses.replace(output, layout=CLASSES, brightness=Brightness(0, white, rule))
    return output


def _has_classes(output: Output) -> bool:
    """Returns whether masks contain class numbers, and not bools or the values of a heat map."""
    first = class_numbers(output.samples[0]) if len(output.samples) else None
    if first is not None and first.dtype.kind == "f" and output.figures is not None:
        is_whole = all((sample == np.rint(sample)).all() for sample in output.samples)
        return is_whole and output.figures.most > 1
    return first is not None and first.dtype.kind in "iu"


def _annotation(
    kind: str, output: Output, outputs: Mapping[str, Output], format: str
) -> Annotation:
    """Returns an annotation with the outputs that belong to it."""
    if kind == "masks":
        return Annotation(kind, output)

    prefix, word = _split(output.name)
    prefixes = dict.fromkeys((prefix, ""))

    def column(words: Sequence[str], dimensions: int) -> Output | None:
        """Returns the output of integers with the first dimensions of the annotation's rows."""
        sizes = [np.atleast_2d(sample).shape for sample in output.samples]
        shapes = [size[:-1][:dimensions] for size in sizes]
        for name in [first + last for first in prefixes for last in words]:
            other = outputs.get(name)
            if (
                other is not None
                and _are_numbers(other, "biu")
                and [sample.size for sample in other.samples] == [*map(math.prod, shapes)]
                and (dimensions or all(0 <= n <= s[0] for n, s in zip(other.samples, sizes)))
            ):
                return other
        return None

    counts = [f"num_{word}", f"{word}_count", f"{word}/count"]
    if kind == "boxes" or not any(other.layout == "boxes" for other in outputs.values()):
        counts.append("count")
    annotation = Annotation(
        kind,
        output,
        labels=column(_LABELS, 1) if kind == "boxes" else None,
        visible=column(("visible", "visibility"), 2) if kind == "points" else None,
        count=column(counts, 0),
    )
    rows = [rows_of(annotation, row)[0] for row in range(len(output.samples))]
    largest = np.concatenate([np.abs(values).max(-1, initial=0) for values in rows])
    largest = largest[np.isfinite(largest)]
    is_float = all(sample.dtype.kind == "f" for sample in output.samples)
    normalized = is_float and largest.size > 0 and bool(np.median(largest) <= _NORMALIZED)
    return dataclasses.replace(annotation, form=BoxForm(format, normalized))


def _doubt(annotation: Annotation, image: Output, by_default: bool) -> str:
    """Returns the reason why an annotation can't be drawn over images; "" if it can.

    ``by_default`` is whether the format of boxes is an assumption.
    """
    output = annotation.output
    if len(output.samples) != len(image.samples):
        return f"there are {len(output.samples)} of it and {len(image.samples)} images"
    if annotation.kind == "masks" and size_of(output, 0) != size_of(image, 0):
        return "its size differs"
    for row in range(len(output.samples) if annotation.kind == "boxes" and by_default else 0):
        values = rows_of(annotation, row)[0]
        for box in values[(values[:, 2:] < values[:, :2]).any(1)]:
            numbers = " ".join(f"{value:.4g}" for value in box)
            return f"box {numbers} of sample {row} is not xyxy: pass format="
    return ""
