"""Windows: images, masks, boxes and points compared with torchvision's, with the same numbers."""

import numpy as np
import pytest
import torch
from torchvision.ops import box_iou
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F
from torchvision.tv_tensors import BoundingBoxes, KeyPoints, wrap

from dalijax import augment, data_iterator, sources
from dalijax.core.augment import iou_crops, windows
from dalijax.core.random.hashing import column_keys, uniform
from drawing import numbers, record_hashes
from parity import check_windows, differences, keep, pixels, tensor

SEED, EPOCH = 5, 0
BILINEAR, NEAREST = InterpolationMode.BILINEAR, InterpolationMode.NEAREST_EXACT
AREA, SCALE, FACTOR = (0.3, 1.0), (0.1, 2.0), (0.7, 1.3)
PADDING = 3, 5, 7, 9  # left, top, right, bottom
LENGTHS = 120, 180, 300


def make_records(photos, size):
    """Records of photographs with 0 to 4 boxes. With a size, their center is cut to it."""
    rng = np.random.default_rng(0)
    records = []
    for number, photo in enumerate(photos * 5):
        if size:
            photo = pixels(F.center_crop(tensor(photo), list(size)))
        height, width = photo.shape[:2]
        corner = rng.uniform(-10, [width - 40, height - 40], (number % 5, 2))
        extent = rng.uniform(11, [width / 2, height / 2], corner.shape)
        records.append(
            {
                "image": np.ascontiguousarray(photo),
                "mask": rng.integers(1, 256, (height, width), np.uint8),
                "boxes": np.concatenate([corner, corner + extent], axis=1).astype(np.float32),
                "ids": rng.integers(0, 1000, number % 5),
                "points": rng.uniform(0, [width, height], (number % 4, 2)).astype(np.float32),
            }
        )
    return records


def run(make, records):
    """Returns the outputs of a window for each record."""

    def graph(image, mask, boxes, ids, points, *, draw):
        window = make(image, boxes, draw)
        kept, kept_ids, count = window.boxes(boxes, ids, max_boxes=9)
        moved, visible, _ = window.points(points, max_points=9)
        return {
            "image": window.image(image),
            "mask": window.mask(mask, fill=0),
            "boxes": kept,
            "ids": kept_ids,
            "count": count,
            "points": moved,
            "visible": visible,
            "matrix": window.matrix(),
        }

    iterator = data_iterator(graph, shuffle=False)
    batch = next(iterator(source=sources.Records(records), batch_size=len(records), seed=SEED))
    arrays = {name: np.asarray(values) for name, values in batch.items()}
    return [{name: values[row] for name, values in arrays.items()} for row in range(len(records))]


# Torchvision's steps for a value of any kind: they receive its height and width, the numbers that
# the record draws, the size of the output, and the interpolation.


def flipped(value, flip):
    """Flips a value. Torchvision maps x of boxes to W - x, but of key points to W - 1 - x."""
    if not flip:
        return value
    value = F.horizontal_flip(value)
    return wrap(value + torch.tensor([1, 0]), like=value) if isinstance(value, KeyPoints) else value


def padded(value, left, top, size):
    """Pads a value to a size, with given numbers of pixels on the left and at the top."""
    height, width = F.get_size(value)
    return F.pad(value, [left, top, size[1] - width - left, size[0] - height - top])


def random_window(value, sizes, u, size, mode):
    start, end = windows.resized_crops(
        u[None].astype(np.float32), np.array([sizes], np.int32), AREA, (3 / 4, 4 / 3)
    )
    place = np.concatenate([start[0], (end - start)[0]]).astype(int).tolist()
    return flipped(F.resized_crop(value, *place, list(size), mode), u[-1] < 0.5)


def scale_window(value, sizes, u, size, mode):
    # ScaleJitter's target size is the width and the height.
    value = v2.ScaleJitter(size[::-1], [SCALE[0] + u[0] * (SCALE[1] - SCALE[0])] * 2, mode)(value)
    extent = F.get_size(value)
    room = [max(one - other, 0) for one, other in zip(extent, size)]
    place = [int(u[1 + axis] * (room[axis] + 1)) for axis in (0, 1)]
    value = F.crop(value, *place, *map(min, extent, size))
    return flipped(padded(value, 0, 0, size), u[3] < 0.5)


def crop_window(value, sizes, u, size, mode):
    value = F.pad(value, list(PADDING))
    room = [one - other for one, other in zip(F.get_size(value), size)]
    value = F.crop(value, *(int(u[axis] * (room[axis] + 1)) for axis in (0, 1)), *size)
    return flipped(value, u[2] < 0.5)


def center_window(value, sizes, u, size, mode):
    return F.center_crop(value, list(size))


def resized_center_window(value, sizes, u, size, mode):
    return F.center_crop(F.resize(value, [300], mode), list(size))


def fit_window(value, sizes, u, size, mode):
    ratio = min(size[0] / sizes[0], size[1] / sizes[1])
    return padded(F.resize(value, [int(side * ratio + 1e-9) for side in sizes], mode), 0, 0, size)


def resize_window(value, sizes, u, size, mode):
    return F.resize(value, list(size), mode)


def shortest(value, length, size, mode):
    transform = v2.RandomShortestSize([length], size[0])  # limits the longer side, too
    sizes, theirs = F.get_size(value), transform.make_params([value])["size"]
    ratio = min(length / min(sizes), size[0] / max(sizes))
    exact = [int(side * ratio + 1e-9) for side in sizes]  # torchvision rounds 240 - 1e-14 to 239
    assert np.isin(np.subtract(exact, theirs), (0, 1)).all()
    return F.resize(value, exact, mode)


def fit_window_of_a_length(value, sizes, u, size, mode):
    return padded(shortest(value, 180, size, mode), 0, 0, size)


def fit_window_of_its_size(value, sizes, u, size, mode):
    return padded(F.resize(value, None, mode, max_size=size[0]), 0, 0, size)


def random_fit_window(value, sizes, u, size, mode):
    value = shortest(value, LENGTHS[int(u[0] * len(LENGTHS))], size, mode)
    return padded(flipped(value, u[1] < 0.5), 0, 0, size)


def affine_window(value, sizes, u, size, mode):
    ratio = min(size[0] / sizes[0], size[1] / sizes[1])
    height, width = (int(side * ratio + 0.5) for side in sizes)
    value = flipped(F.resize(value, [height, width], mode), u[5] < 0.5)
    value = padded(value, (size[1] - width) // 2, (size[0] - height) // 2, size)
    return F.affine(
        value,
        60 * u[0] - 30,
        [round((2 * u[3] - 1) * 0.1 * size[1]), round((2 * u[4] - 1) * 0.2 * size[0])],
        FACTOR[0] + u[2] * (FACTOR[1] - FACTOR[0]),
        [20 * u[1] - 10, 0.0],
        InterpolationMode.NEAREST if mode == NEAREST else mode,
    )


AFFINE = {"degrees": 30, "translate": (0.1, 0.2), "scale": FACTOR, "shear": 10}
# A name: our window, torchvision's steps, the size of the output, and that of the images.
CASES = {
    "random_window": (
        lambda x, size, d: augment.random_window(x, size, draw=d, scale=AREA, flip=0.5, name="w"),
        random_window,
        (192, 224),
        None,
    ),
    "scale_window": (
        lambda x, size, d: augment.scale_window(x, size, draw=d, scale=SCALE, flip=0.5, name="w"),
        scale_window,
        (320, 300),
        None,
    ),
    "crop_window": (
        lambda x, size, d: augment.crop_window(
            x, size, draw=d, padding=PADDING, flip=0.5, name="w"
        ),
        crop_window,
        (310, 400),
        None,
    ),
    "center_window": (
        lambda x, size, d: augment.center_window(x, size, draw=d),
        center_window,
        # Photographs are padded by even numbers only: torchvision rounds half of an odd number
        # down for images, and to even for boxes.
        (410, 481),
        None,
    ),
    "center_window, resized": (
        lambda x, size, d: augment.center_window(x, size, draw=d, resize=300),
        resized_center_window,
        (224, 353),
        None,
    ),
    "fit_window": (
        lambda x, size, d: augment.fit_window(x, size, draw=d),
        fit_window,
        (224, 200),
        None,
    ),
    "resize_window": (
        lambda x, size, d: augment.resize_window(x, size, draw=d),
        resize_window,
        (224, 200),
        None,
    ),
    "fit_window of a length": (
        lambda x, size, d: augment.fit_window(x, size, draw=d, resize=180),
        fit_window_of_a_length,
        (240, 240),
        None,
    ),
    "fit_window of its size": (
        lambda x, size, d: augment.fit_window(x, size, draw=d),
        fit_window_of_its_size,
        (320, 320),
        None,
    ),
    "fit_window of random lengths": (
        lambda x, size, d: augment.fit_window(x, size, draw=d, resize=LENGTHS, flip=0.5, name="w"),
        random_fit_window,
        (240, 240),
        None,
    ),
    "affine_window": (
        lambda x, size, d: augment.affine_window(x, size, draw=d, flip=0.5, name="w", **AFFINE),
        affine_window,
        (300, 400),
        (300, 400),
    ),
    "affine_window, resized": (
        lambda x, size, d: augment.affine_window(x, size, draw=d, flip=0.5, name="w", **AFFINE),
        affine_window,
        (224, 224),
        (300, 400),
    ),
}


def values_of(record):
    """Returns the image, mask, boxes and points of a record, for torchvision."""
    size = record["image"].shape[:2]
    boxes = BoundingBoxes(torch.from_numpy(record["boxes"]), format="XYXY", canvas_size=size)
    return {
        "image": tensor(record["image"]),
        "mask": torch.from_numpy(record["mask"])[None],  # a Mask would be resized by NEAREST
        "boxes": F.clamp_bounding_boxes(boxes),
        "points": KeyPoints(torch.from_numpy(record["points"]), canvas_size=size),
    }


def near_edges(record, ours, size):
    """Returns which pixels of an output are inner, and which have two nearest neighbors.

    Inner pixels are more than two pixels, of the image and of the output, from the edges of both.
    Pixels have two nearest neighbors if their centers are within 0.004 pixels of an edge between
    pixels of the image, since DALI's ``warp_affine`` adds steps in single precision.
    """
    inverse = np.linalg.inv(ours["matrix"].astype(float))
    grid = np.stack(np.meshgrid(np.arange(size[1]), np.arange(size[0])), axis=2) + 0.5
    places = grid @ inverse[:2, :2].T + inverse[:2, 2]
    is_inner = np.ones(size, bool)
    edge = 2 + 2 * np.abs(inverse[:2, :2]).sum(axis=1)
    for values, end, margin in (
        (grid, size[::-1], 2),
        (places, record["image"].shape[1::-1], edge),
    ):
        is_inner &= ((values > margin) & (values < end - np.array(margin))).all(axis=2)
    return is_inner, (np.abs(places - np.rint(places)) < 4e-3).any(axis=2)


def check(name, records, outputs, steps, size, is_within=None):
    """Compares the outputs of a window with torchvision's.

    Args:
        name: The name of the window.
        records: The records.
        outputs: Our outputs for each record.
        steps: Torchvision's steps; they receive a value, the number of its record, and the
            interpolation.
        size: The size of the output.
        is_within: Returns which boxes of a record may stay, given its number.
    """
    pairs = {kind: ([], []) for kind in ("image", "mask", "boxes", "points")}
    for row, (record, ours) in enumerate(zip(records, outputs)):
        theirs = {
            kind: steps(value, row, NEAREST if kind == "mask" else BILINEAR)
            for kind, value in values_of(record).items()
        }
        boxes, ids, points = theirs["boxes"], torch.from_numpy(record["ids"]), theirs["points"]
        if is_within is not None:
            boxes, ids = wrap(boxes[is_within(row)], like=boxes), ids[is_within(row)]
        stays = v2.SanitizeBoundingBoxes()({"boxes": boxes, "labels": ids})
        np.testing.assert_array_equal(ours["ids"][: ours["count"]], stays["labels"])
        is_visible = ((points >= 0) & (points < torch.tensor(size[::-1]))).all(dim=1)
        np.testing.assert_array_equal(ours["visible"][: len(points)], is_visible)
        for kind, one, other in (
            ("image", ours["image"], pixels(theirs["image"])),
            ("mask", ours["mask"], theirs["mask"][0].numpy()),
            ("boxes", ours["boxes"][: ours["count"]], stays["boxes"].numpy()),
            ("points", ours["points"][: len(points)], points.numpy()),
        ):
            pairs[kind][0].append(one)
            pairs[kind][1].append(other)
    masks = pairs.pop("mask")
    levels = {kind: differences(f"{name}, {kind}", *pair) for kind, pair in pairs.items()}
    assert levels["boxes"].size > 80 and levels["boxes"].max() < 1e-3
    assert levels["points"].size > 40 and levels["points"].max() < 1e-3
    is_inner, is_tie = zip(*(near_edges(*pair, size) for pair in zip(records, outputs)))
    inner = levels["image"].reshape(-1, 3)[np.ravel(is_inner)]
    assert np.mean(is_inner) > 0.5 and inner.max() <= 1
    assert np.mean(levels["image"] > 2) < 0.002  # torchvision's crops end before they are resized
    assert np.mean(is_tie) < 0.5
    wrong = np.not_equal(*masks) & ~np.array(is_tie)
    keep(f"{name}, pixels of masks that differ", wrong.mean())
    return wrong.sum()


@pytest.mark.parametrize("name", CASES)
def test_windows_are_torchvisions(photos, name):
    make, steps, size, image_size = CASES[name]
    records = make_records(photos, image_size)
    u = numbers(range(len(records)), "w", windows.COLUMNS + 1, SEED, EPOCH)

    def steps_of(value, row, mode):
        return steps(value, records[row]["image"].shape[:2], u[row], size, mode)

    outputs = run(lambda x, boxes, draw: make(x, size, draw), records)
    num_wrong = check(name, records, outputs, steps_of, size)
    # Torchvision's mask is of nearest neighbors of nearest neighbors if it is resized and rotated.
    assert num_wrong == 0 or name == "affine_window, resized"


def test_odd_padding_is_torchvisions(photos):
    records, size = make_records(photos, None), (431, 516)
    outputs = run(lambda x, boxes, draw: augment.center_window(x, size, draw=draw), records)
    for record, ours in zip(records, outputs):
        image = F.center_crop(tensor(record["image"]), list(size))
        np.testing.assert_array_equal(ours["image"], pixels(image))


def test_windows_on_boxes_are_torchvisions(photos):
    records, size = make_records(photos, None), (200, 180)
    least, num_whole = 0.3, 0
    outputs = run(
        lambda x, boxes, draw: augment.iou_window(
            x, boxes, size, draw=draw, options=[least], flip=0.5, name="w"
        ),
        records,
    )
    places, is_within = [], []
    for record, ours in zip(records, outputs):
        height, width = record["image"].shape[:2]
        (step_x, _, shift_x), (_, step_y, shift_y) = ours["matrix"][:2].astype(float)
        left, right = sorted([-shift_x / step_x, (size[1] - shift_x) / step_x])
        top, bottom = -shift_y / step_y, (size[0] - shift_y) / step_y
        place = np.array([left, top, right, bottom])
        np.testing.assert_allclose(place, np.rint(place), atol=1e-3)
        places.append((*np.rint([top, left, bottom - top, right - left]).astype(int), step_x < 0))

        # The conditions of v2.RandomIoUCrop.
        boxes, place = torch.from_numpy(record["boxes"]), torch.from_numpy(np.rint(place))
        centers = (boxes[:, :2] + boxes[:, 2:]) / 2
        is_within.append(((centers > place[:2]) & (centers < place[2:])).all(dim=1))
        *_, window_height, window_width, _ = places[-1]
        if (window_height, window_width) == (height, width):
            num_whole += 1
            continue
        assert int(0.3 * height) <= window_height and int(0.3 * width) <= window_width
        assert 0.5 <= window_width / window_height <= 2
        assert box_iou(boxes[is_within[-1]].double(), place[None]).max() >= least
    assert num_whole < len(records) / 2  # if there are no boxes, or only small ones

    def steps_of(value, row, mode):
        *place, flip = map(int, places[row])
        return F.resize(flipped(F.crop(value, *place), flip), list(size), mode)

    num_wrong = check("iou_window", records, outputs, steps_of, size, is_within.__getitem__)
    assert num_wrong == 0


@pytest.mark.parametrize("options", ([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0], [0.5]), ids=str)
def test_windows_on_boxes_have_torchvisions_distribution(options):
    size, count = (375, 500), 4000
    boxes = np.array([[30, 40, 180, 200], [250, 100, 480, 350], [300, 10, 330, 60]], float)
    torch.manual_seed(0)
    image = torch.empty((3, *size), dtype=torch.uint8)
    transform = v2.RandomIoUCrop(sampler_options=options)
    inputs = [image, BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=size)]
    params = [transform.make_params(inputs) for _ in range(count)]
    names = ("top", "left", "height", "width")
    theirs = np.array([[one[name] for name in names] for one in params if one], float)

    hashes, keys = record_hashes(np.arange(count)), column_keys("w", iou_crops.NUMBERS)
    start, end = iou_crops.choose(
        lambda rows, part: uniform(hashes[rows], keys[part]),
        np.full((count, 2), size, np.int32),
        np.tile(boxes, (count, 1)),
        np.repeat(np.arange(count), len(boxes)),
        levels=options,
        scale=(0.3, 1.0),
        ratio=(0.5, 2.0),
    )
    ours = np.concatenate([start, end - start], axis=1)
    ours = ours[(ours[:, 2:] != size).any(axis=1)]
    assert abs(len(ours) - len(theirs)) < 0.03 * count
    check_windows(f"iou window {options}", ours.T, theirs.T, size)
