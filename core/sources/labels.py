"""Labels of files, and the names of their classes."""

from __future__ import annotations

import os
import re
import unicodedata
import urllib.parse
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..messages.printable import printable_repr

LABEL, LABELS = "label", "labels"  # the fields of the label of a record, and of its objects
CLASS_MASK = "class_mask"
WITH_CLASSES = frozenset((LABEL, LABELS, CLASS_MASK))  # the fields with numbers of classes
_INT32 = np.iinfo(np.int32)
_UNORDERED = (str, bytes, Mapping, Set)  # iterables that are not lists of names


def classes_of(source: Any) -> tuple[str, ...]:
    """Returns the names of a source's classes by label; empty if the source does not name them."""
    classes = getattr(source, "classes", ())
    are_names = isinstance(classes, (list, tuple)) and all(isinstance(c, str) for c in classes)
    return tuple(classes) if are_names else ()


def merged_classes(classes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the classes of a mixture.

    Args:
        classes: The classes of each source; empty if a source does not name them.

    Raises:
        ValueError: If a label has different names in two sources.
    """
    longest = max(classes, key=len)
    for number, names in enumerate(classes):
        for label, pair in enumerate(zip(longest, names)):
            if len(set(pair)) > 1:
                raise ValueError(
                    f"label {label} is {pair[0]!r} in source {classes.index(longest)} of the "
                    f"mixture, but {pair[1]!r} in source {number}. Pass the same names to each "
                    f"source as classes=[...]: {few(sorted({*longest, *names}))}"
                )
    return longest


def class_names(classes: Any) -> tuple[str, ...]:
    """Converts the argument ``classes`` of `Files` to names, in the order of their labels.

    Raises:
        TypeError: If ``classes`` are neither names nor an object with ``classes``.
        ValueError: If there are no names, or a name occurs twice.
    """
    try:
        names = list(classes_of(classes) if hasattr(classes, "classes") else classes)
    except TypeError:  # not iterable
        names = [None]
    if isinstance(classes, _UNORDERED) or not all(isinstance(name, str) for name in names):
        cure = "sorted(d, key=d.get) for a dict d of labels" if isinstance(classes, Mapping) else ""
        cure = cure or "a list such as ['cat', 'dog'], or a source with class directories"
        raise TypeError(
            f"classes must be names in the order of their labels, not "
            f"{printable_repr(classes, 60)}. Pass {cure}"
        )
    if not names:
        raise ValueError(
            f"classes={printable_repr(classes, 60)} has no names of classes. Pass a list such as "
            "['cat', 'dog'], or a source with class directories"
        )
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ValueError(f"classes contains {name!r} {count} times. Pass each name once")
    return tuple(map(str, names))


def class_numbers(names: Sequence[str], classes: Sequence[str], owner: str) -> NDArray[np.int32]:
    """Returns the labels of class names, int32 [names].

    Args:
        names: The names.
        classes: The names in the order of their labels.
        owner: A description of the objects with these names, for errors.

    Raises:
        ValueError: If some names are not in ``classes``.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    if missing := sorted(set(names) - set(classes)):
        similar = {_simplified(name): name for name in classes}.get(_simplified(missing[0]))
        hint = ""
        if similar is not None:
            hint = (
                f". {missing[0]!a} and {similar!a} of classes= differ in case, spaces or the "
                "encoding of characters"
            )
        raise ValueError(
            f"classes= lacks {few(missing)} of {owner}: its names are {few(classes)}. Add the "
            f"missing names to classes=, or rename them{hint}"
        )
    return np.fromiter((numbers[name] for name in names), np.int32, len(names))


def _simplified(name: str) -> str:
    """Returns a name without differences that are hard to see, such as composed accents."""
    return unicodedata.normalize("NFC", urllib.parse.unquote(name)).casefold().strip()


def misplaced_number(names: Sequence[str]) -> int | None:
    """Returns the first position of a name whose number is not in the order of the numbers.

    Returns None if there is none, or names differ in more than a number, as "cat1" and "dog2" do.
    """
    parts = [re.fullmatch(r"(\D*)(\d+)(\D*)", name) for name in names]
    numbers = [int(part[2]) for part in parts if part]
    if len(numbers) < len(names) or len({(part[1], part[3]) for part in parts if part}) > 1:
        return None
    return next((k for k, (a, b) in enumerate(zip(numbers, sorted(numbers))) if a != b), None)


def as_labels(
    labels: Any, count: int, classes: tuple[str, ...]
) -> NDArray[np.int32] | NDArray[np.float32]:
    """Converts the argument ``labels`` of `Files` to an array [count] or [count, values].

    Args:
        labels: A number, the name of a class, or a vector of numbers for each path.
        count: The number of paths.
        classes: The names of the classes, in the order of their labels; may be empty.

    Returns:
        Integers and names as int32, floats as float32.

    Raises:
        ValueError: If the shape does not fit, or a label is missing or has no 32-bit form.
    """
    array = _as_array(labels)
    if array.shape[:1] != (count,) or array.ndim > 2 or not array.size:
        raise ValueError(
            f"there are {count} paths, but labels of shape {array.shape}. Pass a number per path, "
            f"or an array of shape ({count}, values)"
        )
    if array.dtype.kind in "biu":
        result: Any = array.astype(np.int32)
        is_valid = result == array
    elif array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            result = array.astype(np.float32)
        # Vectors may contain NaN for some values, since a loss can mask these values.
        is_valid = np.isfinite(result) | (np.isnan(array) if array.ndim > 1 else False)
    else:
        objects = array.ravel().tolist()
        is_valid = np.array([isinstance(label, (str, bytes)) for label in objects])
        if not classes or array.ndim > 1 or not is_valid.any():
            is_valid = np.array([array.dtype == object and _is_number(label) for label in objects])
        if is_valid.all():
            return class_numbers(list(map(os.fsdecode, objects)), classes, "the labels")
    if not is_valid.all():
        index = int(np.argmin(is_valid.ravel()))
        label = array.ravel()[index : index + 1].tolist()[0]  # a Python object, for its text
        raise ValueError(f"labels[{index // (array.size // count)}] {_problem(label)}")
    if classes:
        _check_classes(result, classes)
    return result


def _as_array(labels: Any) -> NDArray[Any]:
    """Returns labels as an array; an object array if they differ in length, or some are missing."""
    if np.ma.is_masked(labels):
        labels = labels.tolist()  # with None for masked labels
    try:
        array = np.asarray(labels)
    except ValueError:  # the labels differ in length
        return np.fromiter(labels, object)
    if array.dtype.kind in "OV" and all(map(_is_number, array.ravel().tolist())):
        return np.array(array.tolist())  # nullable integers of a table, or bfloat16
    return array


def _is_number(label: Any) -> bool:
    """Returns whether an object is a number, and fits into int32 if it is an integer."""
    if isinstance(label, (int, np.integer)):
        return bool(_INT32.min <= label <= _INT32.max)
    return isinstance(label, (float, np.floating, np.bool_))


def _problem(label: Any) -> str:
    """Returns the problem of a label that is not a number of 32 bits, and the cure."""
    if isinstance(label, (str, bytes)):
        cure = "Pass the names of the classes in order, e.g. as classes=sorted(set(labels))"
    elif isinstance(label, (int, float)) and label == label:
        cure = "Scale or renumber the labels, e.g. by np.unique(labels, return_inverse=True)"
    elif isinstance(label, (Sequence, np.ndarray)):
        cure = (
            "For several classes per path, pass an array of shape (paths, classes) with 0 and 1, "
            "e.g. of scikit-learn's MultiLabelBinarizer"
        )
    else:
        cure = "Convert the labels to numbers, and omit paths without a label"
    return f"is {printable_repr(label, 60)}, which is not a number of 32 bits. {cure}"


def _check_classes(labels: NDArray[Any], classes: Sequence[str]) -> None:
    """Raises ValueError if labels do not belong to the names of classes."""
    count = len(classes)
    if labels.ndim > 1:
        if labels.shape[1] != count:
            raise ValueError(
                f"labels of shape {labels.shape} need {labels.shape[1]} names, but classes= has "
                f"{count}. Pass a name for each column"
            )
    elif labels.dtype.kind == "f":
        raise ValueError("labels are floats, which have no classes. Omit classes=, or pass int32")
    elif (is_outside := (labels < 0) | (labels >= count)).any():
        row = int(np.argmax(is_outside))
        raise ValueError(
            f"labels[{row}] is {labels[row]}, but classes= has {count} names, for the labels 0 to "
            f"{count - 1}. Pass a name for each label"
        )


def few(names: Sequence[str] | Sequence[bytes]) -> str:
    """Returns a text with the first three names, and the number of the others, for messages."""
    suffix = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(repr(os.fsdecode(name)) for name in names[:3]) + suffix
