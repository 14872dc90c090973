"""The commands of show and tune: ``--source``, and Ctrl-C."""

import re

import numpy as np
import pytest

from conftest import write_jpegs
from dalijax import data_iterator, sources
from dalijax.core.tools.show.command import main as show
from dalijax.core.tools.tune.command import main as tune
from dalijax.tune import tune as measure

NUMBERS = sources.Arrays({"x": np.arange(8, dtype=np.int32)})
take = data_iterator(lambda x: x + 0, ["x"], mask="mask")
# The README's quick start, on a CPU.
PROGRAM = """
from nvidia.dali import fn
from dalijax import augment, data_iterator, sources

@data_iterator(output_map=["images", "labels"], mask="mask")
def train(data, label, *, draw):
    images = fn.decoders.image(data, device="cpu")
    images = augment.random_resized_crop(images, size=8, flip=0.5, draw=draw)
    return images, label

def some():
    return sources.Files("images")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_jpegs(tmp_path / "images" / "class", 8)
    (tmp_path / "ten_lines.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("source", ("images", "ten_lines:some"))
def test_show_takes_a_source(folder, source, capsys):
    show(["ten_lines:train", "--batch-size", "4", "--source", source])
    assert "images, labels, mask: batch.html" in capsys.readouterr().out
    assert (folder / "batch.html").stat().st_size > 1000


def test_tune_takes_a_source(folder, capsys):
    options = ["--batch-size", "4", "--seconds", "0.1", "--threads", "1", "--prefetch", "2"]
    tune(["ten_lines:train", "--source", "images", *options])
    assert "iterator = train(..., num_threads=" in capsys.readouterr().out


@pytest.mark.parametrize("command", (show, tune))
def test_mistakes(folder, command):
    (folder / "a.tar").write_bytes(b"")
    for source, words in (("nowhere", "nowhere"), ("a.tar", r"module:name.*sources\.Tar")):
        with pytest.raises(SystemExit, match=rf"(?s)--source {source}: .*{words}"):
            command(["ten_lines:train", "--batch-size", "4", "--source", source])
    with pytest.raises(SystemExit, match="--arg data=VALUE .*or --source PATH"):
        command(["ten_lines:train", "--batch-size", "4"])


def interrupted(after):
    """A progress function that ends the measurements like Ctrl-C."""

    def progress(done, total, what):
        if done == after:
            raise KeyboardInterrupt

    return progress


def run(after):
    return measure(
        take,
        source=NUMBERS,
        batch_size=4,
        seconds=0.1,
        max_seconds=60,
        num_threads=[1, 4],
        prefetch_queue_depth=[2, 3],
        progress=interrupted(after),
    )


@pytest.mark.slow
def test_ctrl_c_keeps_the_measurements():
    tuned = run(8)  # 6 for threads, 2 for queues
    assert tuned.interrupted and set(tuned.measured) == {"num_threads", "prefetch_queue_depth"}
    assert [len(rounds) for rounds in tuned.measured["num_threads"].values()] == [3, 3]
    assert [len(rounds) for rounds in tuned.measured["prefetch_queue_depth"].values()] == [1, 1]
    assert "prefetch_queue_depth" in tuned.unchanged and tuned.rate > 0 and tuned.before > 0
    assert "prefetch_queue_depth was interrupted" in tuned.failures
    assert re.search(r"\| prefetch_queue_depth \| 2 \(kept\)", tuned.table()) and tuned.summary
    early = run(3)
    assert early.settings["prefetch_queue_depth"] == 2
    assert "prefetch_queue_depth was not tried: interrupted" in early.failures


def test_ctrl_c_before_a_measurement_is_raised():
    with pytest.raises(KeyboardInterrupt):
        run(0)
