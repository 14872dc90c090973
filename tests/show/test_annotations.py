"""Boxes, masks, points and patches in pictures, compared with positions that NumPy computes."""

import io

import numpy as np
import pytest
from PIL import Image
from show_pages import parsed

from dalijax import sources
from dalijax.core.augment.geometry import FORMATS
from dalijax.core.tools.show.contents import contents_of
from dalijax.core.tools.show.drawing import pixels_of
from dalijax.core.tools.show.pixels import NOT_FINITE, class_colors
from dalijax.show import show

RNG = np.random.default_rng(0)
GRAY = (100, 100, 100)
BOX = np.array([[[4, 12, 24, 32]]], np.float32)
SIDE = 320  # pixels, of the longer side of an image with annotations


def gray(count=1, height=40, width=80):
    """Returns gray images, which are enlarged by four."""
    return np.full((count, height, width, 3), GRAY, np.uint8)


def drawn(page, name="image", row=0):
    """Returns the picture of a sample, and the lines below."""
    contents = page.batches[0]
    (output,) = [output for output in contents.outputs if output.name == name]
    (picture,) = pixels_of(output, row, SIDE)
    record = parsed(page).records[row]
    return picture, record.split("\n")


def notes(page):
    return list(page.batches[0].notes)


def changed(picture):
    """Returns top, bottom, left and right of the pixels that are not gray or black."""
    is_changed = (picture != GRAY).any(-1) & (picture != 0).any(-1)
    rows, columns = np.flatnonzero(is_changed.any(1)), np.flatnonzero(is_changed.any(0))
    return rows[0], rows[-1] + 1, columns[0], columns[-1] + 1


def as_format(box, format, width=1, height=1):
    """Returns a box (left, top, right, bottom) in pixels in another format, by its definition."""
    left, top, right, bottom = np.array(box) / [width, height, width, height]
    return {
        "xyxy": (left, top, right, bottom),
        "yxyx": (top, left, bottom, right),
        "xywh": (left, top, right - left, bottom - top),
        "cxcywh": ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top),
    }[format]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_edges_of_boxes(format, normalized):
    box = (12, 8, 61, 31)
    values = as_format(box, format, *((80, 40) if normalized else (1, 1)))
    batch = {"image": gray(), "boxes": np.array([[values, (0, 0, 0, 0)]], np.float32)}
    page = show(batch, format=format)
    picture, lines = drawn(page)
    assert picture.shape == (160, 320, 3)
    left, top, right, bottom = np.array(box) * 4
    color = tuple(class_colors(0, np.nan, np.nan))
    is_edge = (picture == color).all(-1)
    expected = np.zeros((160, 320), bool)
    expected[top:bottom, left:right] = True
    expected[top + 2 : bottom - 2, left + 2 : right - 2] = False
    np.testing.assert_array_equal(is_edge, expected)
    assert (picture[top + 2 : bottom - 2, left + 2 : right - 2] == GRAY).all()
    assert lines == ["boxes: 1 drawn"]
    unit = "in shares of its size" if normalized else "in pixels"
    assert notes(page) == [f"boxes: over image, as {format}, {unit}"]


def test_boxes_that_do_not_fit_are_counted():
    boxes = np.array(
        [
            (-20, -10, 30, 20),
            (70, 30, 90, 50),
            (80, 0, 90, 10),
            (5, 5, 5, 9),
            (np.nan, 0, 1, 1),
            (0, 0, 80.4, 40),  # rounding
        ],
        np.float32,
    )
    picture, lines = drawn(show({"image": gray(), "boxes": boxes[None, :2]}))
    assert lines == ["boxes: 2 drawn, 2 clipped"]
    assert changed(picture) == (0, 160, 0, 320)
    color = class_colors(0, np.nan, np.nan)
    assert (picture[:80, 118:120] == color).all() and (picture[78:80, :120] == color).all()
    _, lines = drawn(show({"image": gray(), "boxes": boxes[None]}))
    assert lines == ["boxes: 3 drawn, 2 clipped, 1 outside of the image, 1 empty, 1 not finite"]


def test_labels_and_counts():
    boxes = np.array([[[4, 12, 24, 32], [40, 12, 60, 32], [50, 20, 70, 39]]] * 2, np.float32)
    labels = np.array([[1, 0, 2], [2, -1, -1]], np.int64)
    batch = {"image": gray(2), "boxes": boxes, "labels": labels, "count": np.array([2, 1])}
    page = show(batch, classes=["cat", "dog"])
    picture, lines = drawn(page)
    assert lines == ["boxes: 2 drawn (dog, cat)"]
    assert drawn(page, row=1)[1] == ["boxes: 1 drawn (2)"]
    for left, label in ((4, 1), (40, 0)):  # the edges and the text have the color of the class
        color = class_colors(label, np.nan, np.nan)
        assert (picture[48 + 10, 4 * left] == color).all()
        assert (picture[48 - 5, 4 * left] == color).all()
    assert changed(picture)[3] == 240  # the third box is padding
    # Without a count, boxes of zeros are padding.
    del batch["count"]
    boxes[1, 1:] = 0
    assert drawn(show(batch), row=1)[1] == ["boxes: 1 drawn (2)"]
    # A count of more boxes than there are rows is the count of something else.
    page = show(batch | {"count": np.array([9, 9])})
    assert drawn(page, row=1)[1] == ["boxes: 1 drawn (2)", "count: 9"]


@pytest.mark.parametrize("dtype", ["u1", "i4", "i8", "u2", "f4", "i1"])
@pytest.mark.parametrize("shape", [(40, 80), (40, 80, 1), (1, 40, 80)])
def test_classes_have_colors(shape, dtype):
    numbers = np.zeros((40, 80), np.int64)
    numbers[10:30, 10:30], numbers[10:30, 50:70], numbers[0] = 1, 2, -1 if dtype == "i1" else 255
    if dtype == "f4":
        numbers[0] = 255
    mask = numbers.astype(dtype).reshape(1, *shape)
    page = show({"image": gray(), "mask": mask})
    palette, _ = drawn(page, "mask")
    large = numbers.repeat(4, 0).repeat(4, 1)
    assert palette.shape == (160, 320, 3)
    assert (palette[large == 0] == 0).all() and (palette[:4] == 255).all()
    colors = [np.unique(palette[large == number], axis=0) for number in (1, 2)]
    assert [len(color) for color in colors] == [1, 1] and (colors[0] != colors[1]).any()
    picture, lines = drawn(page)
    assert lines == [""] and notes(page) == ["mask: over image"]
    opacity = np.where(large[..., None] == 0, 0, 0.45)
    expected = (1 - opacity) * GRAY + opacity * palette
    np.testing.assert_allclose(picture, expected, atol=0.5 + 1e-9)


def test_names_of_classes_are_on_the_mask():
    mask = np.zeros((1, 40, 80), np.uint8)
    mask[:, 10:30, 10:60] = 3
    page = show({"image": gray(), "mask": mask}, classes={"mask": ["sky", "", "", "car"]})
    named, plain = drawn(page, "mask")[0], drawn(show({"mask": mask}), "mask")[0]
    is_text = (named != plain).any(-1)
    assert 20 < is_text.sum() < 2000 and is_text[40:120, 40:240].any()


def test_many_classes_have_different_colors():
    colors = class_colors(np.arange(1, 301), 0, 255)
    assert len(np.unique(colors[np.arange(1, 301) != 255], axis=0)) == 299
    mask = np.arange(40 * 80).reshape(1, 40, 80) // 10
    palette, _ = drawn(show({"mask": mask}), "mask")
    assert len(np.unique(palette.reshape(-1, 3), axis=0)) > 250
    assert not (palette == 255).all(-1).any()  # 255 is a class


def test_masks_of_objects_bools_and_heat_maps():
    objects = np.zeros((1, 5, 40, 80), bool)
    objects[0, 1, :20], objects[0, 4, 10:] = True, True
    palette, _ = drawn(show({"image": gray(), "masks": objects}), "masks")
    assert (palette[:40] == class_colors(2, 0, 255)).all()
    assert (palette[40:] == class_colors(5, 0, 255)).all()
    picture, _ = drawn(show({"image": gray(), "mask": objects[:, 1]}))
    assert (picture[80:] == GRAY).all() and (picture[:80] != GRAY).any(-1).all()
    heat = np.zeros((1, 40, 80, 1), np.float32)
    heat[0, :10], heat[0, 10] = 1, np.nan
    picture, _ = drawn(show({"image": gray(), "heatmap": heat}))
    expected = np.rint(0.55 * np.array(GRAY) + 0.45 * np.array((255, 255, 230)))
    assert (picture[:40] == expected).all()
    assert (picture[40:44] == np.rint(0.55 * np.array(GRAY) + 0.45 * np.array(NOT_FINITE))).all()


def test_points():
    points = np.array([[[10, 10], [60, 30], [90, 10], [20, 20]]], np.float32)
    visible = np.array([[1, 2, 1, 0]])
    picture, lines = drawn(show({"image": gray(), "points": points, "visible": visible}))
    assert lines == ["points: 2 drawn, 1 outside of the image, 1 not visible"]
    for x, y in ((40, 40), (240, 120)):
        assert (picture[y, x] != GRAY).any() and (picture[y - 5 : y + 6, x - 5] == GRAY).all()
    assert changed(picture) == (37, 124, 37, 244)
    # Normalized, in the format of COCO, with a number of keypoints for each of two people.
    people = np.concatenate([points / [80, 40], visible[..., None]], -1).reshape(1, 2, 2, 3)
    other, lines = drawn(show({"image": gray(), "keypoints": people.astype(np.float32)}))
    assert lines == ["keypoints: 2 drawn, 1 outside of the image, 1 not visible"]
    np.testing.assert_array_equal((other != GRAY).any(-1), (picture != GRAY).any(-1))
    cloud = RNG.normal(size=(1, 100, 3)).astype(np.float32)  # x, y, z
    assert notes(show({"image": gray(), "points": cloud})) == []


def test_a_count_of_boxes_is_not_a_count_of_points():
    batch = {
        "image": gray(),
        "boxes": np.array([[[1, 1, 9, 9], [0, 0, 0, 0]]], np.float32),
        "count": np.array([1]),
        "keypoints": RNG.uniform(1, 30, (1, 17, 2)).astype(np.float32),
    }
    assert drawn(show(batch))[1] == ["boxes: 1 drawn", "keypoints: 17 drawn"]


@pytest.mark.parametrize("is_flat", [True, False])
def test_patches(is_flat):
    image = RNG.integers(0, 256, (32, 48, 3)).astype(np.uint8)
    patches = image.reshape(4, 8, 6, 8, 3).swapaxes(1, 2).reshape(24, 8, 8, 3)
    values = patches.reshape(1, 24, -1) if is_flat else patches[None]
    picture, _ = drawn(show({"patches": values}), "patches")
    assert picture.shape == (5 * 9 - 1, 5 * 9 - 1, 3)  # 24 patches in rows of five
    for number, patch in enumerate(patches):
        top, left = 9 * (number // 5), 9 * (number % 5)
        np.testing.assert_array_equal(picture[top : top + 8, left : left + 8], patch)
    assert (picture[8::9] == 255).all() and (picture[:, 8::9] == 255).all()


def test_names_connect_outputs():
    batch = {
        "left": {"image": gray(), "boxes": BOX, "labels": np.array([[1]])},
        "right": {
            "image": gray(),
            "boxes": BOX + np.float32([30, 0, 30, 0]),
            "labels": np.array([[2]]),
        },
    }
    page = show(batch, classes=["cat", "dog", "elk"])
    assert drawn(page, "left/image")[1] == [
        "left/boxes: 1 drawn (dog)",
        "right/boxes: 1 drawn (elk)",
    ]
    assert changed(drawn(page, "left/image")[0])[2] == 16
    assert changed(drawn(page, "right/image")[0])[2] == 136
    page = show({"image": gray(), "gt_boxes": BOX, "gt_labels": np.array([[3]])})
    assert drawn(page)[1] == ["gt_boxes: 1 drawn (3)"]
    # The word "image" counts if there are further outputs of images.
    page = show({"image": gray(), "depth": gray()[..., 0], "boxes": BOX})
    assert notes(page) == ["boxes: over image, as xyxy, in pixels"]


@pytest.mark.parametrize(
    "outputs,note",
    [
        ({"image": None, "left": gray(), "right": gray(1, 9)}, "it fits left and right"),
        ({"gt_boxes": BOX, "pred_boxes": BOX, "boxes": None}, "choose one of them with"),
        ({"mask": np.zeros((1, 20, 40), np.uint8), "boxes": None}, "its size differs"),
        ({"boxes": np.array([[[40, 30, 20, 10]]])}, "box 40 30 20 10 of sample 0 is not xyxy"),
        ({"image": gray(2)}, "there are 1 of it and 2 images"),
    ],
)
def test_nothing_is_drawn_in_doubt(outputs, note):
    batch = {"image": gray(), "boxes": BOX} | outputs
    batch = {name: values for name, values in batch.items() if values is not None}
    page = show(batch)
    assert len(notes(page)) == 1 and note in notes(page)[0]
    for name in {*batch} & {"image", "left", "right"}:
        assert (drawn(page, name)[0] == GRAY).all()
    text = parsed(page).records[0]
    for name in [name for name in batch if name.endswith("boxes")]:  # like other numbers
        assert f"{name}: 4 12 24 32" in text or f"{name}: 40 30 20 10" in text


def test_arguments_choose_outputs(tmp_path):
    target = np.zeros((1, 40, 80), np.int32)
    target[:, 10:20] = 1
    batch = {
        "image": gray(),
        "gt_boxes": np.array([[[14, 22, 20, 20]]], np.float32),
        "pred_boxes": np.zeros((1, 1, 4), np.float32),
        "target": target,
        "pairs": np.array([[[40.0, 20.0]]]),
    }
    options = dict(boxes="gt_boxes", format="cxcywh", masks="target", points="pairs")
    page = show(batch, **options)
    assert sorted(notes(page)) == [
        "gt_boxes: over image, as cxcywh, in pixels",
        "pairs: over image, in pixels",
        "target: over image",
    ]
    assert "pred_boxes: 0 0 0 0" in drawn(page)[1]
    page.save(tmp_path / "sheet.png")
    large, _ = drawn(page)
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    color = class_colors(0, np.nan, np.nan)
    # The box is drawn in the size of the sheet, where images of two outputs are 192 high at most.
    assert (sheet == color).all(-1).any() and (large == color).all(-1).any()


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(boxes="x"), r"\['x'\] are not outputs of the batch, which has \['boxes', 'image'\]"),
        (dict(boxes="image"), r"boxes='image' must have numbers of shape \[n, 4\].* not uint8"),
        (dict(masks="boxes"), r"masks='boxes' must have numbers of shape \[height, width\]"),
        (dict(format="xy"), "format must be one of .* not 'xy'"),
        (dict(classes=["cat"]), "no labels or masks for classes="),
        (dict(points="image", format="xyxy"), r"points='image' must have numbers of shape"),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(ValueError, match=words):
        show({"image": gray(), "boxes": np.zeros((1, 1, 4))}, **options)


def test_a_format_needs_boxes():
    with pytest.raises(ValueError, match=r"Pass boxes= with one of the names \['image', 'x'\]"):
        show({"image": gray(), "x": BOX}, format="xywh")


def encoded(pixels, format="PNG", mode=None):
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, format)
    return file.getvalue()


def test_records_of_a_source():
    numbers = np.zeros((40, 80), np.uint8)
    numbers[10:] = 2
    palette = Image.fromarray(numbers, "L").convert("P")
    file = io.BytesIO()
    palette.save(file, "PNG")
    for mask in (encoded(numbers), encoded(numbers.astype(np.uint16))):
        records = [
            {
                "image": encoded(gray()[0]),
                "mask": mask,
                "boxes": np.full((k, 4), (1, 2, 9, 9), np.float32),
            }
            for k in range(2)
        ]
        page = show(sources.Records(records))
        picture, lines = drawn(page, row=1)
        assert page.title == "Batch of 2 records: image, mask, boxes"
        assert lines == ["boxes: 1 drawn"] and drawn(page)[1] == ["boxes: 0 drawn"]
        assert (picture[100] != GRAY).any() and (picture[20, 300] == GRAY).all()


def test_unusual_annotations_are_drawn(tmp_path):
    boxes = np.array([[[1, 1, 30, 30]]], np.float32)
    many = np.sort(RNG.uniform(0, 40, (1, 1000, 2, 2)), 2).reshape(1, 1000, 4)
    batches = {
        "1000 boxes": {"image": gray(), "boxes": many, "labels": np.arange(1000)[None]},
        "no boxes": {"image": gray(), "boxes": boxes[:, :0], "labels": np.zeros((1, 0), int)},
        "NaN": {
            "image": gray() * np.float32(np.nan),
            "boxes": boxes,
            "mask": gray()[..., 0] * np.nan,
        },
        "one pixel": {"image": gray(1, 1, 1), "boxes": boxes / 30, "mask": gray(1, 1, 1)[..., :1]},
        "huge": {"image": gray(1, 3000, 4000), "boxes": boxes, "mask": gray(1, 3000, 4000)[..., 0]},
        "tall": {"image": gray(1, 3000, 8), "boxes": boxes},
        "no samples": {"image": gray(0), "boxes": boxes[:0], "mask": gray(0)[..., 0]},
        "scalars": {"image": gray(), "boxes": 3.0, "labels": "text", "mask": None, "points": []},
        "other texts": {"image": gray(), "boxes": boxes, "label": ["a"], "count": ["b"]},
        "no image": {"boxes": boxes, "points": boxes[..., :2], "mask": gray()[..., 0]},
        "no file": {"image": [b"\xff\xd8\xff"], "mask": [b"\xff\xd8\xff"], "boxes": boxes},
        "numbers": {
            "image": gray(),
            "boxes": np.full((1, 1, 4), np.inf),
            "mask": np.full((1, 40, 80), 2**63 - 1),
        },
    }
    for name, batch in batches.items():
        page = show(batch)
        page.save(tmp_path / f"{name}.png")
        assert page.title.startswith("Batch of "), name
        parsed(page)
    assert (
        "boxes: 1,000 drawn (0, 1, 2, 3, 4, 5, 6, 7 ...)"
        in parsed(show(batches["1000 boxes"])).records
    )
    huge, _ = drawn(show(batches["huge"]))
    assert huge.shape == (240, 320, 3)


@pytest.mark.parametrize(
    "text", ["<b>&'\"", "\0\x1b[31m\u202e", "שלום", "😀" * 3, "x" * 500, "a\nb"]
)
def test_names_of_classes_may_be_any_text(text, tmp_path):
    batch = {
        "image": gray(),
        f"{text}_boxes": BOX,
        "labels": np.array([[0]]),
        "mask": gray()[..., 0] * 0,
    }
    page = show(batch, classes=[text])
    page.save(tmp_path / "sheet.png")
    found = parsed(page)
    assert {tag for tag, _ in found.elements}.isdisjoint({"b", "script"})
    assert len(found.records) == 1 and "1 drawn (" in found.records[0]


def test_several_captions_have_a_line_each():
    page = show({"image": gray(), "caption": [["a dog", "two dogs"]]})
    assert drawn(page)[1] == ["caption: a dog", "two dogs"]


def test_contents_without_annotations_have_no_notes():
    contents = contents_of({"image": gray(), "boxes": np.zeros((1, 2, 4))}, "")
    assert list(contents.notes) == []
