"""LeRobot data sets as LeRobot 0.6 (v3.0) and 0.3 (v2.1) write them."""

import io
import json
import os
import signal

import numpy as np
from PIL import Image

FPS = 30
LENGTHS = (7, 4, 9, 3)
SIZE = (64, 96)  # height, width
TASKS = ("pick up", "é lay down", "wait")
TOP, WRIST, DEPTH = "observation.images.top", "observation.images.wrist", "observation.depth"
# Codecs of PyAV with their options; LeRobot's default is AV1 with g=2 and crf=30.
AV1 = ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"})
H264 = ("libx264", {"g": "6", "bf": "2", "crf": "20"})  # with frames that need later frames
FILES = {"data": (0, 0, 1, 1), TOP: (0, 0, 0, 1), WRIST: (0, 1, 1, 1), DEPTH: (0, 0, 0, 0)}


def drawn(episode, step, camera):
    """Returns an image, uint8 [height, width, 3], with its numbers as 12 black or white blocks."""
    height, width = SIZE
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    phase = step / 5 + 2 * (camera == WRIST)
    channels = 128 + 60 * np.sin(x / 17 + phase), 128 + 60 * np.cos(y / 13 + episode), 60 + x
    image = np.stack(channels, -1).astype(np.uint8)
    code = (episode << 5 | step) << 1 | (camera == WRIST)
    for bit in range(12):
        image[:8, 8 * bit : 8 * bit + 8] = 255 * (code >> bit & 1)
    return image


def code_of(image):
    """Returns the episode, the step and the camera that an image shows."""
    bits = [int(image[2:6, 8 * bit + 2 : 8 * bit + 6].mean() > 128) for bit in range(12)]
    code = sum(bit << place for place, bit in enumerate(bits))
    return code >> 6, code >> 1 & 31, WRIST if code & 1 else TOP


def depth_of(episode, step):
    """Returns depth in millimeters, uint16 [height, width]."""
    x, y = np.meshgrid(np.arange(SIZE[1]), np.arange(SIZE[0]))
    return (500 + 300 * episode + 10 * step + x + 2 * y).astype(np.uint16)


def encoded(image, kind):
    """Returns an image as a PNG, JPEG or TIFF."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind)
    return file.getvalue()


def values_of(episode, length):
    """Returns the values of the steps of an episode, by feature."""
    rng = np.random.default_rng(episode)
    steps = np.arange(length)
    return {
        "observation.state": rng.normal(size=(length, 6)).astype(np.float32),
        "action": np.stack([np.full(length, episode), steps], 1).astype(np.float32),
        "action.original": rng.normal(size=(length, 2, 3)),
        "gripper": rng.random(length).astype(np.float32),
        "next.done": steps == length - 1,
        "count": np.stack([steps, -steps, steps << 40], 1),
        "note": np.array([f"n{step}" for step in steps]),
        "timestamp": (steps / FPS).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(length, episode),
        "index": steps + sum(LENGTHS[:episode]),
        "task_index": np.where(steps < 3, episode % 2, 2),
    }


def described(name, column):
    """Returns the description of a feature in info.json."""
    dtype = "string" if column.dtype.kind == "U" else str(column.dtype)
    return {"dtype": dtype, "shape": list(column.shape[1:]) or [1], "names": None}


def write_video(path, images, codec):
    """Writes images as a video, uint8 [height, width, 3], or codes of depth, uint16."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    name, options = codec
    is_depth = images[0].dtype == np.uint16
    with av.open(str(path), "w", options={"movflags": "faststart"}) as file:
        stream = file.add_stream(name, rate=FPS, options=options)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "gray12le" if is_depth else "yuv420p"
        for image in images:
            frame = av.VideoFrame.from_ndarray(image, format="gray12le" if is_depth else "rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


def column_of(values):
    """Returns a column of parquet."""
    import pyarrow as pa

    if values.ndim == 1:
        return pa.array(values.tolist() if values.dtype.kind == "U" else values)
    if values.ndim == 2:  # datasets.Sequence with a length
        return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    return pa.array(values.tolist())  # the storage of datasets.Array2D


def table_of(episode, length, images):
    """Returns the rows of an episode as a table."""
    import pyarrow as pa

    columns = {name: column_of(values) for name, values in values_of(episode, length).items()}
    for camera, kind in images.items():
        rows = []
        for step in range(length):
            pixels = depth_of(episode, step) if camera == DEPTH else drawn(episode, step, camera)
            rows.append({"bytes": encoded(pixels, kind), "path": f"frame-{step:06d}.png"})
        columns[camera] = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    return pa.table(columns)


def double(item, advance):
    """Doubles a number in another process; fails for "error", and is killed for "kill"."""
    if item == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "error":
        raise ValueError("no number")
    advance(item)
    return 2 * item


def write(root, version="v3.0", videos=None, images=None, lengths=LENGTHS):
    """Writes a data set.

    Args:
        root: The new folder.
        version: "v3.0" or "v2.1".
        videos: The codec of each camera with videos.
        images: The format of each camera whose images are in the parquet files.
        lengths: The number of steps of each episode; at most four.
    """
    import pyarrow.parquet as pq

    videos, images = videos or {}, images or {}
    is_v3 = version == "v3.0"
    features = {}
    for camera in (*videos, *images):
        node = {"dtype": "video" if camera in videos else "image"}
        node |= {"shape": [*SIZE, 1 if camera == DEPTH else 3]}
        node |= {"names": ["height", "width", "channels"], "info": {}}
        if camera == DEPTH and camera in videos:
            node["info"] = {"is_depth_map": True, "video.depth_max": 5.0, "video.use_log": False}
        features[camera] = node
    features |= {name: described(name, column) for name, column in values_of(0, 1).items()}
    tables = [table_of(number, length, images) for number, length in enumerate(lengths)]
    info = {
        "codebase_version": version,
        "robot_type": "arm",
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": len(TASKS),
        "chunks_size": 1000 if is_v3 else 2,
        "fps": FPS,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        if is_v3
        else "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        if is_v3
        else "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": features,
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(info, indent=4))
    if is_v3:
        rows = episode_rows(lengths, videos)
        write_tables(root, "data", tables, lengths)
        for camera, codec in videos.items():
            for file in set(FILES[camera][: len(lengths)]):
                numbers = [k for k in range(len(lengths)) if FILES[camera][k] == file]
                path = root / f"videos/{camera}/chunk-000/file-{file:03d}.mp4"
                write_video(path, frames_of(camera, numbers, lengths), codec)
        write_metadata(root, rows)
        return root
    for number, length in enumerate(lengths):
        path = root / f"data/chunk-{number // 2:03d}/episode_{number:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(tables[number], path)
        for camera, codec in videos.items():
            path = root / f"videos/chunk-{number // 2:03d}/{camera}/episode_{number:06d}.mp4"
            write_video(path, frames_of(camera, [number], lengths), codec)
    lines = {
        "episodes": [
            {"episode_index": k, "tasks": tasks_of(k, n), "length": n, "success": k % 2 == 0}
            for k, n in enumerate(lengths)
        ],
        "tasks": [{"task_index": k, "task": task} for k, task in enumerate(TASKS)],
    }
    for name, entries in lines.items():
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (root / "meta" / f"{name}.jsonl").write_text(text)
    return root


def tasks_of(episode, length):
    """Returns the tasks of an episode."""
    return [TASKS[k] for k in sorted(set(values_of(episode, length)["task_index"].tolist()))]


def frames_of(camera, numbers, lengths):
    """Returns the images of some episodes; codes of depth are linear from 0.01 m to 5 m."""
    frames = []
    for episode in numbers:
        for step in range(lengths[episode]):
            if camera == DEPTH:
                meters = depth_of(episode, step) / 1000
                frames.append(np.rint((meters - 0.01) / 4.99 * 4095).astype(np.uint16))
            else:
                frames.append(drawn(episode, step, camera))
    return frames


def episode_rows(lengths, cameras):
    """Returns the rows of meta/episodes."""
    rows = []
    for number, length in enumerate(lengths):
        first = sum(lengths[:number])
        row = {"episode_index": number, "tasks": tasks_of(number, length), "length": length}
        row |= {"data/chunk_index": 0, "data/file_index": FILES["data"][number]}
        row |= {"dataset_from_index": first, "dataset_to_index": first + length}
        for camera in cameras:
            file = FILES[camera][number]
            before = sum(lengths[k] for k in range(number) if FILES[camera][k] == file)
            row[f"videos/{camera}/chunk_index"] = 0
            row[f"videos/{camera}/file_index"] = file
            row[f"videos/{camera}/from_timestamp"] = before / FPS
            row[f"videos/{camera}/to_timestamp"] = (before + length) / FPS
        row |= {"stats/action/min": [0.0, 0.0], "success": number % 2 == 0}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": number // 3}
        rows.append(row)
    return rows


def write_metadata(root, rows):
    """Writes meta/episodes and meta/tasks.parquet; the tasks are the index of pandas."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = root / "meta" / "episodes" / "chunk-000"
    folder.mkdir(parents=True, exist_ok=True)
    for file in {row["meta/episodes/file_index"] for row in rows}:
        members = [row for row in rows if row["meta/episodes/file_index"] == file]
        pq.write_table(pa.Table.from_pylist(members), folder / f"file-{file:03d}.parquet")
    index = pd.Index(TASKS, name="task")
    tasks = pd.DataFrame({"task_index": range(len(TASKS))}, index=index)
    tasks.to_parquet(root / "meta" / "tasks.parquet")


def write_tables(root, folder, tables, lengths):
    """Writes the data files, with a row group for each episode in the first, one in the second."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = root / folder / "chunk-000"
    path.mkdir(parents=True)
    for file in set(FILES["data"][: len(lengths)]):
        members = [t for k, t in enumerate(tables) if FILES["data"][k] == file]
        if file == 0:
            with pq.ParquetWriter(path / f"file-{file:03d}.parquet", members[0].schema) as writer:
                for table in members:
                    writer.write_table(table)
        else:
            pq.write_table(pa.concat_tables(members), path / f"file-{file:03d}.parquet")
