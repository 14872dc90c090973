"""A training script that saves its position and can be killed at any moment; see test_kill.py.

Usage: kill_trainer.py FOLDER CHECKPOINT EPOCHS EVERY

It waits for a line (or the end) of its input before each step and prints a line after each step.
Every few steps it saves the state of the data and its log.
"""

import hashlib
import json
import os
import pathlib
import sys

import jax
from nvidia.dali import fn

from dalijax import data_iterator
from numbered import read_files

BATCH = 4


def graph(files):
    data, label = read_files(files, random_shuffle=True, initial_fill=16, pad_last_batch=True)
    image = fn.noise.gaussian(fn.decoders.image(data), stddev=9.0)
    return fn.flip(image, horizontal=fn.random.coin_flip()), label, fn.random.normal()


def save(path, content):
    with open(path + ".new", "w") as file:
        json.dump(content, file)
    os.replace(path + ".new", path)


def train(folder, checkpoint, epochs, every):
    files = sorted(map(str, pathlib.Path(folder).iterdir()))
    make = data_iterator(graph, ["image", "x", "u"], reader_name="reader", mask="mask")
    iterator = make(files, batch_size=BATCH)
    log = []
    if os.path.exists(checkpoint):
        saved = json.loads(pathlib.Path(checkpoint).read_text())
        iterator.set_state(saved["state"])
        log = saved["log"]
    while True:
        epoch = iterator.get_state()["epoch"]
        if epoch == epochs:
            break
        for batch in iterator:
            sys.stdin.readline()
            log.append(
                {
                    "epoch": epoch,
                    "samples": batch["x"].ravel()[batch["mask"]].tolist(),
                    "image": hashlib.sha256(batch["image"].tobytes()).hexdigest(),
                    "u": batch["u"].tobytes().hex(),
                }
            )
            print(len(log), flush=True)  # noqa: T201
            if len(log) % every == 0:
                save(checkpoint, {"state": iterator.get_state(), "log": log})
        iterator.reset()
    save(checkpoint, {"state": iterator.get_state(), "log": log})


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
