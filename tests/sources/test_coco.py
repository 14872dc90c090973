"""`Coco` compared with pycocotools, and its errors about annotations and images that do not fit."""

import contextlib
import io
import json
import pickle
import sys
import unicodedata

import jax
import numpy as np
import pytest
from nvidia.dali import fn
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.errors import BatchError, StateError
from range_server import serving

pytest.importorskip("pycocotools")
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

CATEGORIES = {7: "dog", 3: "cat", 90: "tooth brush"}  # not in the order of their ids


def draw_image(path, size, orientation=0, seed=0):
    exif = Image.Exif()
    if orientation:
        exif[0x112] = orientation
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG" if path.suffix == ".png" else "JPEG", exif=exif)


def segmentation(number, x, y, w, h, size):
    """Returns polygons, run lengths, or compressed run lengths."""
    from pycocotools import mask

    if number % 3 == 0:
        first = [x, y, x + w, y, x + w / 2, y + h]
        return [first, [x, y + h / 2, x + w, y + h / 2, x + w, y + h, x, y + h]]
    pixels = np.zeros(size, np.uint8, order="F")
    pixels[int(y) : int(y + h), int(x) : int(x + w)] = 1
    compressed = mask.encode(pixels)
    if number % 3 == 1:
        return {"size": list(size), "counts": compressed["counts"].decode()}
    flat = pixels.ravel(order="F")
    runs = np.diff(np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1, [flat.size]]))
    runs = runs.tolist() if flat[0] == 0 else [0, *runs.tolist()]
    return {"size": list(size), "counts": runs}


def make_content(count=9, seed=0):
    """Returns the content of an annotation file; every third image has no objects."""
    rng = np.random.default_rng(seed)
    images, objects = [], []
    for number in rng.permutation(count).tolist():
        height, width = rng.integers(60, 120, 2).tolist()
        name = f"{'ab'[number % 2]}/{number:03d}.jpg"
        images.append({"id": 40 + 3 * number, "file_name": name, "height": height, "width": width})
        for _ in range(number % 3):
            w, h = np.round(rng.uniform(8, 50, 2), 2).tolist()
            x, y = np.round(rng.uniform(0, [width - w, height - h]), 2).tolist()
            item = {
                "id": 1000 + len(objects),
                "image_id": images[-1]["id"],
                "category_id": int(rng.choice([*CATEGORIES])),
                "bbox": [x, y, w, h],
                "area": w * h * 0.7,
                "iscrowd": int(len(objects) % 5 == 1),
                "segmentation": segmentation(len(objects), x, y, w, h, (height, width)),
            }
            objects.insert(int(rng.integers(len(objects) + 1)), item)
    categories = [{"id": key, "name": name} for key, name in CATEGORIES.items()]
    return {"images": images, "annotations": objects, "categories": categories}


def write(folder, content, draw=True):
    for image in content["images"] if draw else ():
        size = image["height"], image["width"]
        draw_image(folder / "images" / image["file_name"], size, seed=image["id"])
    (folder / "instances.json").write_text(json.dumps(content))
    return folder / "instances.json", folder / "images"


@pytest.fixture
def content():
    return make_content()


@pytest.fixture
def paths(tmp_path, content):
    return write(tmp_path, content)


def reference(path):
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(path))


def everything(source):
    names = [name for name in source.fields if name != "data"]
    columns = source.read(np.arange(len(source)), names)
    return [{name: columns[name][k] for name in names} for k in range(len(source))]


@pytest.mark.parametrize("without_crowd", (False, True))
def test_records_are_those_of_pycocotools(paths, without_crowd):
    coco = reference(paths[0])
    source = sources.Coco(*paths, masks=True, without_crowd=without_crowd)
    ids = sorted(coco.imgs)
    assert len(source) == len(ids) and source.classes == ("cat", "dog", "tooth brush")
    assert source.category_ids.tolist() == [3, 7, 90]
    files = source.read(np.arange(len(ids)), ["data"])["data"]
    num_objects, sizes = [], []
    for image_id, file, record in zip(ids, files, everything(source)):
        image = coco.imgs[image_id]
        objects = coco.imgToAnns[image_id]
        if without_crowd:
            objects = [item for item in objects if not item["iscrowd"]]
        assert bytes(file).decode() == str(paths[1] / image["file_name"])
        boxes = np.array([item["bbox"] for item in objects]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        np.testing.assert_array_equal(record["boxes"], boxes.astype(np.float32))
        labels = source.category_ids[record["labels"]].tolist()
        assert labels == [item["category_id"] for item in objects]
        assert record["crowd"].tolist() == [bool(item["iscrowd"]) for item in objects]
        np.testing.assert_allclose(record["area"], [item["area"] for item in objects], rtol=1e-6)
        assert record["image_id"] == image_id and record["image_id"].dtype == np.int32
        assert record["image_size"].tolist() == [image["height"], image["width"]]
        # Crowds first, then larger objects: later objects cover earlier objects.
        object_mask = np.zeros((image["height"], image["width"]), np.int32)
        for k in sorted(
            range(len(objects)), key=lambda k: (not objects[k]["iscrowd"], -objects[k]["area"])
        ):
            object_mask[coco.annToMask(objects[k]) == 1] = k + 1
        np.testing.assert_array_equal(record["object_mask"], object_mask)
        class_mask = np.append(0, record["labels"] + 1)[object_mask]
        np.testing.assert_array_equal(record["class_mask"], class_mask)
        assert record["class_mask"].dtype == np.uint8
        num_objects.append(len(objects))
        sizes.append(record["boxes"].shape)
        for name, field in source.fields.items():
            if name != "data":
                assert (record[name].dtype, record[name].ndim) == (field.dtype, field.ndim), name
    assert source.num_objects.tolist() == num_objects and (0, 4) in sizes
    assert sum(num_objects) == (7 if without_crowd else 9)


def test_an_evaluation_of_perfect_predictions_scores_one(paths):
    """The boxes of padded batches, mapped back to the images, are those of the annotation file."""
    source = sources.Coco(*paths)

    @data_iterator(last_batch_policy="partial", shuffle=False)
    def evaluate(data, boxes, labels, crowd, image_id, image_size, *, draw):
        window = augment.fit_window(fn.decoders.image(data), (160, 96), draw=draw)
        boxes, labels, crowd, count = window.boxes(boxes, labels, crowd, max_boxes=4)
        return {
            "image": window.image(fn.decoders.image(data)),
            "matrix": window.matrix(),
            "boxes": boxes,
            "labels": labels,
            "crowd": crowd,
            "count": count,
            "image_id": image_id,
            "image_size": image_size,
        }

    results, sizes = [], {}
    for batch in evaluate(source=source, batch_size=4):
        batch = jax.device_get(batch)
        for row, count in enumerate(batch["count"]):
            inverse = np.linalg.inv(batch["matrix"][row].astype(float))
            corners = batch["boxes"][row, :count].reshape(-1, 2, 2) @ inverse[:2, :2].T
            corners = (corners + inverse[:2, 2]).reshape(-1, 4)
            corners[:, 2:] -= corners[:, :2]
            sizes[int(batch["image_id"][row])] = batch["image_size"][row].tolist()
            results += [
                {
                    "image_id": int(batch["image_id"][row]),
                    "category_id": int(source.category_ids[label]),
                    "bbox": box.tolist(),
                    "score": 0.9,
                }
                for box, label in zip(corners, batch["labels"][row])
            ]
    coco = reference(paths[0])
    assert sizes == {k: [im["height"], im["width"]] for k, im in coco.imgs.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert evaluation.stats[0] == 1.0 and evaluation.stats[8] == 1.0


def test_training_batches_have_boxes_on_their_objects(tmp_path):
    """Each image is black, except for its object: boxes and masks follow it through the window."""
    content = {"images": [], "annotations": [], "categories": [{"id": 5, "name": "square"}]}
    for number in range(6):
        pixels = np.zeros((100, 80), np.uint8)
        x, y, side = 5 + 9 * number, 12 + 8 * number, 20
        pixels[y : y + side, x : x + side] = 255
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        name = f"{number}.png"
        content["images"].append({"id": number, "file_name": name, "height": 100, "width": 80})
        shape = [[x, y, x + side, y, x + side, y + side, x, y + side]]
        content["annotations"].append(
            {"id": number, "image_id": number, "category_id": 5, "bbox": [x, y, side, side],
             "area": side * side, "iscrowd": 0, "segmentation": shape}
        )  # fmt: skip
    paths = write(tmp_path, content, draw=False)

    @data_iterator
    def train(data, boxes, labels, class_mask, object_mask, *, draw):
        image = fn.decoders.image(data)
        window = augment.scale_window(image, 128, draw=draw, scale=(0.8, 1.6), flip=0.5)
        boxes, labels, count = window.boxes(boxes, labels, max_boxes=2)
        return {
            "image": window.image(image),
            "boxes": boxes,
            "labels": labels,
            "count": count,
            "class_mask": window.mask(class_mask, fill=0),
            "objects": window.mask(object_mask, fill=0),
        }

    source = sources.Coco(*paths, masks=True)
    seen = 0
    for batch in train(source=source, batch_size=3, seed=3):
        batch = jax.device_get(batch)
        np.testing.assert_array_equal(batch["class_mask"], batch["objects"])
        for row, count in enumerate(batch["count"]):
            for x0, y0, x1, y1 in batch["boxes"][row, :count]:
                inside = np.zeros((128, 128), bool)
                inside[round(y0) : round(y1), round(x0) : round(x1)] = True
                both = (inside & (batch["class_mask"][row] == 1)).sum()
                assert both > 0.85 * (inside | (batch["class_mask"][row] == 1)).sum()
                assert batch["image"][row][inside].mean() > 200
                assert batch["labels"][row, 0] == 0
                seen += 1
    assert seen >= 5


def test_records_without_objects_can_be_left_out(paths):
    source = sources.Coco(*paths)
    chosen = sources.Selection(source, source.num_objects > 0)
    assert 0 < len(chosen) < len(source) and chosen.classes == source.classes
    assert all(len(boxes) for boxes in chosen.read(np.arange(len(chosen)), ["boxes"])["boxes"])


# Names of classes


def test_the_labels_of_validation_data_are_those_of_the_training_data(tmp_path, content):
    train = sources.Coco(*write(tmp_path / "train", content))
    content["categories"] = content["categories"][:1]  # dog
    content["annotations"] = [a for a in content["annotations"] if a["category_id"] == 7]
    paths = write(tmp_path / "val", content)
    alone, val = sources.Coco(*paths), sources.Coco(*paths, classes=train)
    assert alone.classes == ("dog",) and val.classes == train.classes
    assert val.category_ids.tolist() == [-1, 7, -1]
    for source, label in ((alone, 0), (val, 1)):
        labels = np.concatenate(source.read(np.arange(len(source)), ["labels"])["labels"])
        assert len(labels) and set(labels.tolist()) == {label}
    with pytest.raises(ValueError, match=r"classes= lacks 'cat', 'tooth brush' of the categories"):
        sources.Coco(
            tmp_path / "train" / "instances.json", tmp_path / "train/images", classes=alone
        )

    mixture = sources.Mixture([(train, 1), (alone, 1)])
    with pytest.raises(ValueError, match="label 0 is 'cat' in source 0 .* but 'dog' in source 1"):
        data_iterator(lambda labels: labels, ["labels"])(source=mixture, batch_size=2)


def test_a_map_that_returns_other_labels_has_no_classes(paths):
    source = sources.Coco(*paths, masks=True)
    for name in ("labels", "class_mask"):
        assert not hasattr(
            source.map(lambda record: {name: record[name] // 2}, inputs=[name]), "classes"
        )
    assert source.map(lambda record: {"x": 0}, inputs=["area"]).classes == source.classes


def test_class_masks_of_many_classes_have_16_bits(tmp_path, content):
    content["categories"] = [{"id": k, "name": f"{k}"} for k in range(300)]
    source = sources.Coco(*write(tmp_path, content), masks=True)
    assert source.fields["class_mask"].dtype == np.uint16
    masks = source.read(np.arange(len(source)), ["class_mask"])["class_mask"]
    assert {*np.unique(np.concatenate([mask.ravel() for mask in masks]))} == {0, 4, 8, 91}


# States


def test_the_identity_depends_on_the_annotations_and_not_on_their_layout(tmp_path, content):
    paths = write(tmp_path, content)
    first = sources.Coco(*paths).identity()
    paths[0].write_text(json.dumps({"info": {"year": 1}, **content}, indent=2))
    assert sources.Coco(*paths).identity() == first
    assert sources.Coco(*paths, without_crowd=True).identity() != first
    assert pickle.loads(pickle.dumps(sources.Coco(*paths))).identity() == first
    for key, value in (("bbox", [1, 2, 3, 4]), ("category_id", 3), ("iscrowd", 1), ("area", 5.5)):
        changed = json.loads(json.dumps(content))
        item = next(a for a in changed["annotations"] if a[key] != value)
        item[key] = value
        paths[0].write_text(json.dumps(changed))
        assert sources.Coco(*paths).identity() != first, key
    changed = json.loads(json.dumps(content))
    changed["annotations"][0]["segmentation"] = [[0, 0, 9, 0, 9, 9]]
    with_masks = sources.Coco(*write(tmp_path, content, draw=False), masks=True).identity()
    paths[0].write_text(json.dumps(changed))
    assert sources.Coco(*paths).identity() == first
    assert sources.Coco(*paths, masks=True).identity() != with_masks


def test_a_state_of_other_annotations_is_refused(tmp_path, content):
    paths = write(tmp_path, content)

    def iterator():
        train = data_iterator(lambda boxes, labels: fn.pad([boxes])[0], ["boxes"])
        return train(source=sources.Coco(*paths), batch_size=3)

    state = iterator().get_state()
    iterator().set_state(state)
    content["annotations"][0]["bbox"][0] += 1
    write(tmp_path, content, draw=False)
    with pytest.raises(StateError, match="records"):
        iterator().set_state(state)


# Images that differ from their annotations


def graph(**decoder):
    @data_iterator(shuffle=False)
    def images(data, boxes, image_id, *, draw):
        window = augment.fit_window(fn.decoders.image(data, **decoder), 64, draw=draw)
        image = window.image(fn.decoders.image(data, **decoder))
        return {"image": image, "boxes": window.boxes(boxes)[0], "image_id": image_id}

    return images


def test_an_image_of_another_size_is_a_bad_record(tmp_path, content):
    paths = write(tmp_path, content)
    image = content["images"][0]
    height, width = image["height"], image["width"]
    draw_image(paths[1] / image["file_name"], (height + 1, width))
    source = sources.Coco(*paths)
    text = (
        rf"{image['file_name']} has {height + 1} x {width} pixels, but its annotations are of "
        rf"{height} x {width}\. The annotations belong to another version of the image"
    )
    with pytest.raises(BatchError, match=text):
        list(graph()(source=source, batch_size=len(source)))
    (batch,) = graph()(source=source, batch_size=len(source), on_error="mask", mask=True)
    record = sorted(im["id"] for im in content["images"]).index(image["id"])
    assert np.flatnonzero(~batch["mask"]).tolist() == [record]
    assert source.identity() == sources.Coco(*paths).identity()  # states exist, too


@pytest.mark.parametrize("orientation", (3, 6, 8))
def test_turned_images_are_refused_unless_the_arguments_fit(tmp_path, content, orientation):
    """The sizes show a quarter turn; `Window.boxes` refuses the other turns, too."""
    paths = write(tmp_path, content)
    swaps = orientation > 4
    for image in content["images"]:
        size = (image["height"], image["width"]) if image["height"] != image["width"] else (50, 70)
        image["height"], image["width"] = size
        draw_image(paths[1] / image["file_name"], size, orientation)
    of_stored = write(tmp_path, content, draw=False)

    def run(stored, **decoder):
        source = sources.Coco(*of_stored, orientation="stored" if stored else "displayed")
        return list(graph(**decoder)(source=source, batch_size=3))

    assert len(run(True, adjust_orientation=False)) == 3
    with pytest.raises(BatchError, match="the EXIF orientation turns data"):
        run(True)
    if swaps:
        cure = r"the stored pixels\. Pass orientation='stored', and decode with adjust_orient"
        for decoder in ({}, {"adjust_orientation": False}):
            with pytest.raises(ValueError, match=cure):  # no record can replace them
                run(False, **decoder)
        for image in content["images"]:
            image["height"], image["width"] = image["width"], image["height"]
        write(tmp_path, content, draw=False)
        with pytest.raises(ValueError, match="as it is displayed. Omit orientation='stored'"):
            run(True)


def test_a_damaged_image_is_a_bad_record_of_its_own_kind(tmp_path, content):
    paths = write(tmp_path, content)
    name = content["images"][2]["file_name"]
    (paths[1] / name).write_bytes(b"no image")
    with pytest.raises(BatchError, match=f"{name} can't be (read|decoded).*isn't an image"):
        list(graph()(source=sources.Coco(*paths), batch_size=9))


# Names of files

NFC, NFD = (unicodedata.normalize(form, "Müll é.png") for form in ("NFC", "NFD"))


def one_image(folder, names, files):
    images = [
        {"id": k, "file_name": name, "height": 20, "width": 30 + k} for k, name in enumerate(names)
    ]
    for k, file in enumerate(files):
        draw_image(folder / "images" / file, (20, 30 + k))
    categories = [{"id": 1, "name": "x"}]
    return write(folder, {"images": images, "annotations": [], "categories": categories}, False)


@pytest.mark.parametrize(
    "name, file", ((NFC, NFD), (NFD, NFC), (NFC, NFC), (f"ä/{NFC}", f"ä/{NFD}"))
)
def test_names_fit_in_any_normal_form(tmp_path, name, file):
    source = sources.Coco(*one_image(tmp_path, [name], [file]))
    path = bytes(source.read(np.zeros(1, int), ["data", "boxes"])["data"][0]).decode()
    assert path == str(tmp_path / "images" / file)
    other = sources.Coco(*one_image(tmp_path / "other", [name], [name]))
    assert source.identity() == other.identity()


def test_equal_bytes_are_preferred_and_ambiguous_names_are_refused(tmp_path):
    source = sources.Coco(*one_image(tmp_path / "both", [NFD, NFC], [NFD, NFC]))
    data = source.read(np.arange(2), ["data", "boxes"])["data"]
    assert [bytes(path).decode().rpartition("/")[2] for path in data] == [NFD, NFC]
    # The composed character, and the letter with the composed accent of another kind.
    angstrom = ("\u00c5.png", "A\u030a.png", "\u212b.png")
    with pytest.raises(ValueError, match=r"'\\u212b.png' fits several files.*Rename or remove"):
        sources.Coco(*one_image(tmp_path / "several", angstrom[2:], angstrom[:2]))
    with pytest.raises(ValueError, match="the images 0 and 1 have file names that differ only in"):
        sources.Coco(*one_image(tmp_path / "same", [NFC, NFD], [NFC]))


@pytest.mark.parametrize(
    "name, text",
    (
        ("b/missing.jpg", "1 of 9 images of the annotation file are not in .*: 'b/missing.jpg'"),
        ("c/000.jpg", "1 of 9 images .*: 'c/000.jpg'"),
        ("a", "1 of 9 images"),  # a folder
        ("../x.jpg", r"the file name '../x.jpg' of image \d+ is not in"),
        ("/x.jpg", r"the file name '/x.jpg' of image \d+ is not in"),
    ),
)
def test_missing_files_are_named(paths, content, name, text):
    content["images"][4]["file_name"] = name
    error = ValueError if name[0] in "./" else FileNotFoundError
    with pytest.raises(error, match=text):
        sources.Coco(*write(paths[0].parent, content, draw=False))


# Wrong annotation files


def change(content, key, number, **values):
    content[key][number].update(values)


WRONG = {
    "the image id .* occurs more than once: for '": lambda c: change(
        c, "images", 1, id=c["images"][0]["id"]
    ),
    "the category id 7 occurs more than once: for 'dog' and 'cat'": lambda c: change(
        c, "categories", 1, id=7
    ),
    "1 annotations refer to image_ids that are not in 'images': 5, such as the annotation with the "
    "id 1": lambda c: change(c, "annotations", 2, image_id=5),
    "5 annotations refer to category_ids .*: 0, 1, 2 and 2 more": lambda c: [
        change(c, "annotations", k, category_id=k) for k in range(6)
    ],
    r"has bbox=\[1, 2, 3\]. It must be 4 numbers": lambda c: change(
        c, "annotations", 0, bbox=[1, 2, 3]
    ),
    "has bbox=None": lambda c: change(c, "annotations", 0, bbox=None),
    "has id='000'. It must be an integer": lambda c: change(c, "images", 0, id="000"),
    "has id=1180591620717411303424. It must be an integer": lambda c: change(
        c, "images", 0, id=1 << 70
    ),
    r"has the height and width \[\d+, 0\]": lambda c: change(c, "images", 0, width=0),
    "has height=None. It must be an integer": lambda c: c["images"][0].pop("height"),
    "has file_name=''": lambda c: change(c, "images", 0, file_name=""),
    "has name=None. It must be a text": lambda c: c["categories"][0].pop("name"),
    "it has no images": lambda c: c.update(images=[]),
    "image 0 has id=None": lambda c: c.update(images=[3]),
    r"has \['categories', 'images'\]. Pass the file of COCO's object instances": lambda c: c.pop(
        "annotations"
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_annotations_are_named(paths, content, text):
    WRONG[text](content)
    write(paths[0].parent, content, draw=False)
    with pytest.raises(ValueError, match=text) as caught:
        sources.Coco(*paths)
    assert str(paths[0]) in str(caught.value)


def test_other_files_are_refused(paths, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{")
    with pytest.raises(ValueError, match=r"other\.json: it is not JSON: Expecting"):
        sources.Coco(other, paths[1])
    other.write_bytes(b"PK\xff\xfe")
    with pytest.raises(ValueError, match="is not a JSON file in UTF-8"):
        sources.Coco(other, paths[1])
    with pytest.raises(FileNotFoundError, match="missing.json"):
        sources.Coco(tmp_path / "missing.json", paths[1])
    with pytest.raises(NotADirectoryError, match="but Coco takes a directory. Extract archives"):
        sources.Coco(paths[0], other)
    with pytest.raises(ValueError, match="orientation must be 'displayed' or 'stored'"):
        sources.Coco(*paths, orientation="any")


def test_missing_keys_have_defaults(paths, content):
    for item in content["annotations"]:
        del item["iscrowd"], item["area"]
    source = sources.Coco(*write(paths[0].parent, content, draw=False))
    for record in everything(source):
        sides = record["boxes"][:, 2:] - record["boxes"][:, :2]
        np.testing.assert_allclose(record["area"], sides.prod(axis=1), rtol=1e-5)
        assert not record["crowd"].any()


@pytest.mark.parametrize("shape", (None, [], [["a"]], {"size": [5, 7], "counts": [3, 32]}))
def test_a_wrong_segmentation_is_a_bad_record(paths, content, shape):
    change(content, "annotations", 0, segmentation=shape)
    name = next(
        im["file_name"]
        for im in content["images"]
        if im["id"] == content["annotations"][0]["image_id"]
    )
    source = sources.Coco(*write(paths[0].parent, content, draw=False), masks=True)
    masks = data_iterator(lambda class_mask: fn.pad([class_mask])[0], ["mask"])
    with pytest.raises(
        BatchError, match=f"the segmentation of object . of .*{name} can't be drawn"
    ):
        next(masks(source=source, batch_size=9))


def test_masks_need_pycocotools(paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(
        ImportError, match=r'masks=True of dalijax.sources.Coco .*"dalijax\[coco\]"'
    ):
        sources.Coco(*paths, masks=True)
    assert len(sources.Coco(*paths)) == 9


def test_large_image_ids_are_int64(paths, content):
    change(content, "images", 0, id=1 << 40)
    content["annotations"] = []
    source = sources.Coco(*write(paths[0].parent, content, draw=False))
    assert source.fields["image_id"].dtype == np.int64
    ids = source.read(np.arange(9), ["image_id"])["image_id"]
    assert ids.dtype == np.int64 and ids[-1] == 1 << 40


# Remote files


def test_a_bucket_has_the_records_of_a_folder(tmp_path, content):
    pytest.importorskip("obstore")
    local = sources.Coco(*write(tmp_path / "bucket" / "coco", content))
    with serving(tmp_path) as (url, _):
        options = {"key": "a", "secret": "b", "region": "us-east-1", "endpoint_url": url}
        remote = sources.Coco(
            "s3://bucket/coco/instances.json", "s3://bucket/coco/images", storage_options=options
        )
        files = remote.read(np.arange(len(remote)), ["data", "boxes"])
        for k, path in enumerate(local.read(np.arange(len(local)), ["data"])["data"]):
            with open(bytes(path), "rb") as file:
                assert files["data"][k].tobytes() == file.read()
        first, second = (
            [jax.device_get(batch) for batch in graph()(source=source, batch_size=3)]
            for source in (local, remote)
        )
        jax.tree.map(np.testing.assert_array_equal, first, second)
