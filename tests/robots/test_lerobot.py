"""LeRobot data sets, packed as RLDS, compared with PyAV, TensorFlow and the written values."""

import fcntl
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys

import lerobot_data
import numpy as np
import pytest
import tensorflow as tf
from lerobot_data import AV1, DEPTH, FPS, H264, LENGTHS, TASKS, TOP, WRIST
from PIL import Image, JpegImagePlugin

from dalijax.core.robots.lerobot.dataset import Feature
from dalijax.core.robots.lerobot.depth import DepthCodes
from dalijax.core.robots.lerobot.image_encoding import ImageEncoding
from dalijax.core.robots.lerobot.pack import PackOptions, pack_lerobot
from dalijax.core.robots.lerobot.processes import call_in_processes
from dalijax.sources import RLDS
from full import in_full

av = pytest.importorskip("av", reason="av is in the extra lerobot")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is in the extra lerobot")
import pyarrow as pa  # noqa: E402
from media_files import matrix, turned  # noqa: E402

STEPS = sum(LENGTHS)
LOSSLESS = ("libx265", {"x265-params": "lossless=1:log-level=none"})
LAYOUTS = {
    "v3-av1": {"videos": {TOP: AV1, WRIST: H264, DEPTH: LOSSLESS}},
    "v2.1-h264": {"version": "v2.1", "videos": {TOP: H264}, "images": {WRIST: "JPEG"}},
    "v3-images": {"images": {TOP: "PNG", WRIST: "JPEG", DEPTH: "TIFF"}},
    "v2.1-images": {"version": "v2.1", "images": {TOP: "PNG", DEPTH: "PNG"}},
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Writes a data set of each layout once."""
    folder, made = tmp_path_factory.mktemp("lerobot"), {}

    def root(name):
        if name not in made:
            made[name] = lerobot_data.write(folder / name / "Robo-1", **LAYOUTS[name])
        return made[name]

    return root


@pytest.fixture
def copied(roots, tmp_path):
    """Copies a data set, to damage it."""
    return lambda name: shutil.copytree(roots(name), tmp_path / "copy")


def pack(root, out, workers=1, **options):
    return pack_lerobot(str(root), str(out), PackOptions(**options), workers)


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def examples(folder):
    """Returns the features of each episode, as TensorFlow parses them."""
    paths = sorted(str(path) for path in folder.glob("*.tfrecord*"))
    episodes = []
    for raw in tf.data.TFRecordDataset(paths):  # verifies the checksums
        table = tf.train.Example.FromString(raw.numpy()).features.feature
        episodes.append({k: list(getattr(v, v.WhichOneof("kind")).value) for k, v in table.items()})
    return episodes


def decoded_by_pyav(root, camera, episode):
    """Returns the frames of an episode, decoded from the beginning of the file."""
    info = json.loads((root / "meta" / "info.json").read_text())
    if info["codebase_version"] == "v2.1":
        path, start = f"videos/chunk-{episode // 2:03d}/{camera}/episode_{episode:06d}.mp4", 0
    else:
        file = lerobot_data.FILES[camera][episode]
        path = f"videos/{camera}/chunk-000/file-{file:03d}.mp4"
        start = sum(LENGTHS[k] for k in range(episode) if lerobot_data.FILES[camera][k] == file)
    with av.open(str(root / path)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    return frames[start : start + LENGTHS[episode]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_values_are_those_of_the_data_set(roots, tmp_path, layout):
    root, out = roots(layout), tmp_path / "out"
    packed = pack(root, out, shard_steps=10)
    assert (packed.steps, packed.episodes, packed.shards) == (STEPS, 4, 2)
    assert len(list(out.glob("robo_1-train.tfrecord-0000?-of-00002"))) == 2
    described = json.loads((out / "features.json").read_text())["featuresDict"]["features"]
    steps = described["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    assert steps["action.original"]["tensor"]["shape"] == {"dimensions": ["2", "3"]}
    episodes = examples(out)
    assert [len(features["steps/is_first"]) for features in episodes] == list(LENGTHS)
    cameras = {**LAYOUTS[layout].get("videos", {}), **LAYOUTS[layout].get("images", {})}
    for number, (features, length) in enumerate(zip(episodes, LENGTHS)):
        for name, values in lerobot_data.values_of(number, length).items():
            key = f"steps/{name.replace('observation.', 'observation/')}"
            stored = features[key]
            if values.dtype.kind == "U":
                stored = [text.decode() for text in stored]
            elif values.dtype.kind == "f":
                values = values.astype(np.float32)
            np.testing.assert_array_equal(np.array(stored), values.ravel(), key)
        tasks = [TASKS[k] for k in lerobot_data.values_of(number, length)["task_index"]]
        assert [text.decode() for text in features["steps/language_instruction"]] == tasks
        assert features["steps/is_first"] == [1] + [0] * (length - 1)
        assert features["steps/is_last"] == [0] * (length - 1) + [1]
        metadata = {k: v for k, v in features.items() if not k.startswith("steps/")}
        assert {name.split("/")[1]: value for name, value in metadata.items()} == {
            "episode_index": [number],
            "fps": [FPS],
            "length": [length],
            "robot_type": [b"arm"],
            "success": [number % 2 == 0],
            "task": [tasks[0].encode()],
        }
        for camera in cameras:
            images = features[f"steps/{camera.replace('observation.', 'observation/')}"]
            check_images(root, camera, number, images, camera in LAYOUTS[layout].get("videos", {}))


def check_images(root, camera, number, images, is_video):
    assert len(images) == LENGTHS[number]
    frames = decoded_by_pyav(root, camera, number) if is_video and camera != DEPTH else None
    for step, data in enumerate(images):
        if camera == DEPTH:
            depth = tf.io.decode_png(data, dtype=tf.uint16).numpy()[..., 0]
            wanted = lerobot_data.depth_of(number, step).astype(int)
            # Half of a code of a video, which is 4,990 / 4,095 mm, and the rounding.
            assert np.abs(depth - wanted).max() <= (1.2 if is_video else 0)
            continue
        image = tf.io.decode_jpeg(data).numpy()
        assert lerobot_data.code_of(image) == (number, step, camera)
        original = frames[step] if is_video else lerobot_data.drawn(number, step, camera)
        assert np.abs(image.astype(int) - original).mean() < 3


def test_rlds_reads_the_result_with_its_shapes(roots, tmp_path):
    out = tmp_path / "out"
    pack(roots("v3-av1"), out, shard_steps=1)
    fields = {
        "image": "steps/observation/images.top",
        "depth": "steps/observation/depth",
        "action": ("steps/action", range(3)),
        "original": "steps/action.original",
        "done": "steps/next.done",
        "prompt": "steps/language_instruction",
        "success": "episode_metadata/success",
    }
    source = RLDS(out / "*.tfrecord*", fields, cache_dir=tmp_path / "cache")
    assert (len(source), source.first.tolist()) == (STEPS, [0, *np.cumsum(LENGTHS)])
    rows = source.read(np.arange(STEPS), list(source.fields))
    for row in (0, 6, 7, STEPS - 1):
        number = int(source.episode[row])
        step = row - int(source.first[number])
        image = tf.io.decode_jpeg(rows["image"][row].tobytes()).numpy()
        assert lerobot_data.code_of(image) == (number, step, TOP)
        last = LENGTHS[number] - 1
        window = [[number, min(step + k, last)] for k in range(3)]
        np.testing.assert_array_equal(rows["action"][row], window)
        values = lerobot_data.values_of(number, LENGTHS[number])
        original = values["action.original"][step].astype(np.float32)
        np.testing.assert_array_equal(rows["original"][row], original)
        assert rows["prompt"][row] == TASKS[values["task_index"][step]]
        assert rows["done"].dtype == bool and rows["done"][row] == (step == last)
        assert rows["success"][row] == (number % 2 == 0)


def test_options_of_the_encoding(roots, tmp_path):
    sizes = {}
    for quality, subsampling, number in ((95, "4:2:0", 2), (95, "4:4:4", 0), (30, "4:2:0", 2)):
        out = tmp_path / f"{quality}{number}"
        options = {"quality": quality, "subsampling": subsampling, "exclude": (WRIST,)}
        pack(roots("v3-images"), out, **options, name="arm")
        (features, *_) = examples(out)
        assert "steps/observation/images.wrist" not in features
        data = features["steps/observation/images.top"][0]
        with Image.open(io.BytesIO(data)) as image:
            assert JpegImagePlugin.get_sampling(image) == number
        sizes[quality, number] = len(data)
        assert list(out.glob("arm-train*"))
    assert sizes[30, 2] < sizes[95, 2] < sizes[95, 0]


def test_stored_jpegs_and_deep_pngs_are_kept(roots, tmp_path):
    pack(roots("v2.1-images"), tmp_path / "png")
    pack(roots("v3-images"), tmp_path / "jpeg")
    (png, *_), (jpeg, *_) = examples(tmp_path / "png"), examples(tmp_path / "jpeg")
    depth, drawn = lerobot_data.depth_of(0, 0), lerobot_data.drawn(0, 0, WRIST)
    assert png["steps/observation/depth"][0] == lerobot_data.encoded(depth, "PNG")
    assert jpeg["steps/observation/images.wrist"][0] == lerobot_data.encoded(drawn, "JPEG")


@pytest.mark.parametrize("unit", (None, "mm", "m"))
@pytest.mark.parametrize(
    "stored",
    (
        np.array([[0, 1, 66, 65535]], np.uint16),
        np.array([[-5, 0, 3, 70000]], np.int32),
        np.array([[-1, 0, 0.0014, 2.5, 70, 70000, np.nan, np.inf]], np.float32),
    ),
    ids=lambda stored: stored.dtype.name,
)
def test_stored_depth_has_lerobots_unit(stored, unit):
    """LeRobot multiplies meters by 1000; new images have the unit that it infers from the dtype."""
    info = {"is_depth_map": True, **({"depth_unit": unit} if unit else {})}
    codes = DepthCodes.parse({"info": info})
    factor = 1000 if (unit or ("m" if stored.dtype.kind == "f" else "mm")) == "m" else 1
    wanted = np.rint(np.nan_to_num(stored.astype(float) * factor, posinf=65535)).clip(0, 65535)
    converted = codes.convert(stored)
    assert converted.dtype == np.uint16
    np.testing.assert_array_equal(converted, wanted)
    if stored.dtype != np.int32:  # Pillow's modes of depth images
        format = "PNG" if stored.dtype == np.uint16 else "TIFF"
        data = lerobot_data.encoded(stored, format)
        feature = Feature("image", (*stored.shape, 1), codes)
        packed = ImageEncoding(95, "4:2:0").encode_stored(data, feature)
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(packed))), wanted)
        assert (packed == data) == (format == "PNG" and unit != "m")


def test_depth_has_one_channel():
    data = lerobot_data.encoded(np.zeros((4, 4, 3), np.uint8), "PNG")
    with pytest.raises(ValueError, match="a depth image has 3 channels instead of 1"):
        ImageEncoding(95, "4:2:0").encode_stored(data, Feature("image", (4, 4, 3), DepthCodes()))


def test_a_video_of_depth_needs_no_unit():
    info = {"is_depth_map": True, "depth_unit": "cm"}
    assert DepthCodes.parse({"dtype": "video", "info": info}).depth_max == 10.0
    with pytest.raises(ValueError, match="depth_unit='cm' is neither 'm' nor 'mm'"):
        DepthCodes.parse({"dtype": "image", "info": info})


def test_a_feature_may_be_named_like_the_folder_of_observations(copied, tmp_path):
    root = copied("v3-images")
    features = json.loads((root / "meta" / "info.json").read_text())["features"]
    names = [name for name in features if name.startswith("observation.")]
    change_info(root, lambda info: info["features"].update(observation=features["action"]))
    for path in (root / "data").rglob("*.parquet"):
        change_table(path, lambda table: table.append_column("observation", table["action"]))
    with pytest.raises(ValueError, match="'observation' can't be next to 'observation.' features"):
        pack(root, tmp_path / "both")
    pack(root, tmp_path / "alone", exclude=tuple(names))
    for example in examples(tmp_path / "alone"):
        assert example["steps/observation"] == example["steps/action"]


def test_single_steps_are_found_by_their_timestamps(copied, tmp_path):
    """Episodes that use every second frame of a video, from the third on."""
    root = copied("v2.1-h264")
    path = root / "data/chunk-001/episode_000002.parquet"
    table = pq.read_table(path)
    for rows, tolerance, words in (
        ([2, 4, 8], 1e-4, ""),
        ([2, 4, 9], 1e-4, "step 2 needs a frame at 0.300000 s, but the nearest is at 0.266667 s"),
        ([2, 4, 8.4], 0.015, ""),
        ([2, 4, 4], 1e-4, "'timestamp' is not increasing"),
    ):
        chosen = table.take([0, 1, 2])
        times = pa.array((np.array(rows) / FPS).astype(np.float32))
        place = chosen.schema.get_field_index("timestamp")
        pq.write_table(chosen.set_column(place, "timestamp", times), path)
        change_lines(root, 2, length=3)
        out = tmp_path / f"out{rows}"
        if words:
            with pytest.raises(ValueError, match=f"episode 2.*{words}") as raised:
                pack(root, out, tolerance=tolerance)
            assert not out.exists() and str(root) in str(raised.value)
            continue
        pack(root, out, tolerance=tolerance)
        images = examples(out)[2]["steps/observation/images.top"]
        shown = [lerobot_data.code_of(tf.io.decode_jpeg(image).numpy())[1] for image in images]
        assert shown == [2, 4, 8]


def change_lines(root, number, **values):
    path = root / "meta" / "episodes.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[number] |= values
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def cut(path, share=0.6):
    os.truncate(path, int(share * path.stat().st_size))


def change_info(root, change):
    path = root / "meta" / "info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


def change_table(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def replaced(name, values):
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values)


DATA = "data/chunk-000/file-000.parquet"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
VIDEO = f"videos/{WRIST}/chunk-000/file-001.mp4"
CLIP = f"videos/{TOP}/chunk-000/file-000.mp4"
# A change of the data set, and words of the error.
DAMAGES = {
    "no video": (lambda r: os.unlink(r / VIDEO), "file-001.mp4: the file of episode 1 can't be"),
    "no parquet": (lambda r: os.unlink(r / DATA), "file-000.parquet: the file of episode 0 can't"),
    "cut video": (
        lambda r: cut(r / VIDEO),
        f"{VIDEO}: episode [123], camera '{WRIST}'.*(needs a frame at|can't be decoded|damaged)",
    ),
    "short video": (
        lambda r: lerobot_data.write_video(
            r / VIDEO, lerobot_data.frames_of(WRIST, [1, 2], LENGTHS), H264
        ),
        f"episode 3, camera '{WRIST}'.*needs a frame at 0.433333 s, but the nearest is at 0.4000",
    ),
    "turned video": (
        lambda r: (r / VIDEO).write_bytes(turned((r / VIDEO).read_bytes(), matrix(180))),
        f"episode 1, camera '{WRIST}'.*its frames are rotated by 180 degrees clockwise",
    ),
    "empty video": (lambda r: cut(r / VIDEO, 0), "episode 1.*the video can't be decoded"),
    "sound": (lambda r: shutil.copy(r / "meta/info.json", r / CLIP), "episode 0.*can't be decoded"),
    "cut parquet": (lambda r: cut(r / DATA), "episode 0: it is not a readable parquet file"),
    "rows": (
        lambda r: change_table(r / DATA, lambda table: table.slice(0, 10)),
        "episode 1: it has 3 rows of the episode, but meta has 4 steps",
    ),
    "order": (
        lambda r: change_table(
            r / DATA, lambda table: table.take([0, 1, 2, 3, 4, 5, 7, 6, 8, 9, 10])
        ),
        "episode 0: the rows of the episode are not adjacent",
    ),
    "column": (
        lambda r: change_table(r / DATA, lambda table: table.drop_columns(["gripper"])),
        "episode 0: it has no column 'gripper'",
    ),
    "kind": (
        lambda r: change_table(r / DATA, replaced("gripper", pa.array(range(11)))),
        "'gripper' contains int64, but info.json has float32",
    ),
    "width": (
        lambda r: change_table(r / DATA, replaced("action", pa.array([[0.5] * 3] * 11))),
        r"'action' has lists of the lengths \[\[3\]\], but info.json has \(2,\)",
    ),
    "null": (
        lambda r: change_table(r / DATA, replaced("gripper", pa.array([None] * 11, pa.float32()))),
        "'gripper' has rows without a value",
    ),
    "task": (
        lambda r: change_table(r / DATA, replaced("task_index", pa.array([7] * 11))),
        "episode 0: has the task_index 7, which is not a task",
    ),
    "size": (
        lambda r: change_info(r, lambda info: info["features"][TOP].update(shape=[64, 64, 3])),
        "has 64x96 pixels .height x width., but meta/info.json has 64x64",
    ),
    "episodes": (
        lambda r: os.unlink(r / "meta/episodes/chunk-000/file-001.parquet"),
        "has 3 episodes, but .*total_episodes=4",
    ),
    "tasks": (lambda r: cut(r / "meta/tasks.parquet"), "tasks.parquet is not a parquet file"),
    "version": (
        lambda r: change_info(r, lambda info: info.update(codebase_version="v1.6")),
        "has the version 'v1.6', but only",
    ),
    "path": (
        lambda r: change_info(r, lambda info: info.update(data_path="../{chunk_index}.parquet")),
        "data_path='../.*leads out of the data set",
    ),
    "template": (
        lambda r: change_info(r, lambda info: info.update(data_path="{episode_index}")),
        "data_path=.* is not a path",
    ),
    **{
        f"pointer {path}": (
            lambda r, path=path: (r / path).write_bytes(POINTER),
            f"{path} can't be read: it is a git-lfs pointer; run git lfs pull",
        )
        for path in (VIDEO, DATA, "meta/tasks.parquet", "meta/info.json")
    },
    "info": (lambda r: cut(r / "meta/info.json"), "is not the description of a LeRobot data set"),
    "rate": (
        lambda r: change_info(r, lambda info: info.update(fps=0)),
        "is not the description of a LeRobot data set: ValueError..fps=0.0",
    ),
    "feature": (
        lambda r: change_info(r, lambda info: info["features"].update({"a/b": {}})),
        "the feature 'a/b' can't be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_sets_are_refused(copied, tmp_path, damage):
    root = copied("v3-av1")
    change, words = DAMAGES[damage]
    change(root)
    with pytest.raises((ValueError, OSError), match=words) as raised:
        pack(root, tmp_path / "out")
    assert str(root) in str(raised.value) and not (tmp_path / "out").exists()


def test_damaged_bytes_of_a_video_are_an_error_or_other_pixels(copied, tmp_path):
    root = copied("v2.1-h264")
    path = root / f"videos/chunk-000/{TOP}/episode_000000.mp4"
    data, rng = path.read_bytes(), np.random.default_rng(0)
    num_errors = 0
    for number, place in enumerate(rng.integers(0, len(data), 12)):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            pack(root, tmp_path / f"out{number}", exclude=(WRIST,), shard_steps=1)
        except ValueError as error:
            num_errors += 1
            assert f"{path}: episode 0" in str(error)
    assert num_errors


def test_features_of_other_kinds_are_left_out(copied, tmp_path):
    root = copied("v3-images")
    node = {"dtype": "language", "shape": [1], "names": None}
    change_info(root, lambda info: info["features"].update(language_events=node))
    assert pack(root, tmp_path / "out").omitted == {"language_events": "language"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quality": 0}, "1 to 100, not 0"),
        ({"quality": 101}, "1 to 100, not 101"),
        ({"tolerance": 0.0}, "positive seconds, not 0.0"),
        ({"tolerance": float("nan")}, "positive seconds, not nan"),
        ({"shard_steps": 0}, "at least 1 step, not 0"),
        ({"name": "a-b"}, "letters, digits and '_', not 'a-b'"),
        ({"exclude": ("arm",)}, "--exclude arm: there is no such feature.*action"),
        ({"exclude": ("timestamp",)}, "no features 'timestamp' and 'episode_index'"),
        ({"workers": 0}, "--workers must be at least 1"),
    ],
)
def test_unsuitable_options_are_refused(roots, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        pack(roots("v3-images"), tmp_path / "out", **options)


# Resuming

# Kills its process, at the second shard, after an episode, or between the file and its entry.
PROGRAM = """
import os, signal, sys
from dalijax.core.robots.lerobot import pack, shard

root, out, place = sys.argv[1:]
write, add = shard.ShardWriter.write, pack.Manifest.add

def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def write_second(writer, item, advance):
    is_second = item.first == 2 and place == "episode"
    return write(writer, item, kill if is_second else advance)

def add_second(manifest, entry):
    kill() if entry["episodes"][0] == 2 and place == "entry" else add(manifest, entry)

shard.ShardWriter.write, pack.Manifest.add = write_second, add_second
pack.pack_lerobot(root, out, pack.PackOptions(shard_steps=10), 1)
"""


@pytest.mark.parametrize("place", ["episode", in_full("entry")])
def test_a_killed_run_is_resumed(roots, tmp_path, place):
    root, out = roots("v3-images"), tmp_path / "out"
    pack(root, tmp_path / "uninterrupted", shard_steps=10)
    command = [sys.executable, "-c", PROGRAM, str(root), str(out), place]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stderr
    folder = tmp_path / "out.incomplete"
    assert not out.exists() and len((folder / "manifest.jsonl").read_text().splitlines()) == 2
    finished = folder / "robo_1-train.tfrecord-00000-of-00002"
    stamp = finished.stat().st_mtime_ns
    packed = pack(root, out, shard_steps=10)
    assert packed.num_kept == 1 and not folder.exists()
    assert (out / finished.name).stat().st_mtime_ns == stamp
    assert files_of(out) == files_of(tmp_path / "uninterrupted")


@pytest.fixture
def begun(roots, tmp_path):
    """Packs a data set, and makes it incomplete without its second shard."""
    root, out = roots("v3-images"), tmp_path / "out"
    pack(root, out, shard_steps=10)
    whole = files_of(out)
    folder = tmp_path / "out.incomplete"
    out.rename(folder)
    (folder / "robo_1-train.tfrecord-00001-of-00002").unlink()
    return root, out, folder, whole


@pytest.mark.parametrize("damage", ["bit", "cut", "entry", "line", "plan", "none"])
def test_damaged_shards_and_entries_are_written_again(begun, damage):
    root, out, folder, whole = begun
    shard, listed = folder / "robo_1-train.tfrecord-00000-of-00002", folder / "manifest.jsonl"
    lines = listed.read_text().splitlines(keepends=True)
    if damage == "bit":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        cut(shard)
    elif damage == "entry":
        listed.write_text(lines[0] + lines[1][:50])
    elif damage == "line":
        listed.write_text(lines[0] + "x\n[3]\n" + lines[1])
    elif damage == "plan":
        listed.write_text("{" + "".join(lines[1:]))
    packed = pack(root, out, shard_steps=10)
    assert packed.num_kept == (damage in ("line", "none")) and files_of(out) == whole


def test_a_complete_data_set_is_verified_and_repaired(begun):
    root, out, _, whole = begun
    pack(root, out, shard_steps=10)
    assert pack(root, out, shard_steps=10).num_kept == 2
    cut(out / "robo_1-train.tfrecord-00001-of-00002")
    assert pack(root, out, shard_steps=10).num_kept == 1 and files_of(out) == whole


def test_an_output_of_other_data_or_options_is_refused(begun, copied):
    root, out, folder, _ = begun
    with pytest.raises(ValueError, match="out.incomplete was begun with .*quality was 95, and is"):
        pack(root, out, shard_steps=10, quality=90)
    other = copied("v3-images")
    change_info(other, lambda info: info.update(fps=31))
    with pytest.raises(ValueError, match="data was '.*Pass the same again, or another output"):
        pack(other, out, shard_steps=10)
    shutil.rmtree(folder)
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(ValueError, match="out exists already. Pass a new folder"):
        pack(root, out)


def test_a_folder_that_another_process_writes_is_refused(begun):
    root, out, folder, _ = begun
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(OSError, match="another process is writing .*out.incomplete"):
            pack(root, out, shard_steps=10)
    finally:
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["2"])
def test_the_command_packs_in_processes(roots, tmp_path, workers):
    root, out = roots("v3-images"), tmp_path / "out"
    pack(root, tmp_path / "alone", shard_steps=10)
    command = [sys.executable, "-m", "dalijax.sources", "pack-lerobot", str(root), str(out)]
    options = ["--workers", workers, "--shard-steps", "10"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert re.search(r"out: 23 steps of 4 episodes in 2 files, [\d.]+ MB", result.stdout)
    assert files_of(out) == files_of(tmp_path / "alone")


@pytest.mark.parametrize(
    ("items", "error", "words"),
    [
        in_full([1, 2, 3, 4, 5], None, ""),
        in_full([1, "error", 3], ValueError, "no number"),
        in_full([1, "kill", 3], RuntimeError, "ended with the exit code -9.*fewer --workers"),
    ],
)
def test_calls_in_processes(items, error, words):
    progress = []
    results = call_in_processes(lerobot_data.double, items, 2, progress.append)
    if error is None:
        assert sorted(results) == [2, 4, 6, 8, 10] and sorted(progress) == items
        return
    with pytest.raises(error, match=words):
        list(results)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("package", ["av", "pyarrow"])
def test_missing_packages_are_named(roots, tmp_path, monkeypatch, package):
    root = roots("v3-images")  # is written by the packages
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "dalijax\[lerobot\]"'):
        pack(root, tmp_path / "out")
