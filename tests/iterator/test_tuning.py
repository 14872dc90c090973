"""The autotuner: its conclusions from figures, and measurements of real pipelines."""

import functools
import inspect
import pathlib
import re
import sys
import xml.etree.ElementTree

import matplotlib
import numpy as np
import pytest
from forks import run_fork
from nvidia.dali import fn
from PIL import Image
from shardings import rows_over

import dalijax.tune
from dalijax import data_iterator
from dalijax.core.tools.tune.command import main
from dalijax.core.tools.tune.memory import Memory
from dalijax.core.tools.tune.tune import choose, thread_counts
from dalijax.tune import Tuned
from dalijax.tune import tune as tune_within
from numbered import read_files

# On a busy machine, builds may take longer than the measurements.
tune = functools.partial(tune_within, max_seconds=float("inf"))


@pytest.mark.parametrize(
    "rates,before,value,clear",
    [
        # The fastest, if it is clearly the fastest.
        ({1: [100, 101, 99], 2: [200, 199, 202], 4: [300, 299, 305]}, 1, 4, True),
        # The cheapest of equal settings.
        ({1: [100, 101, 99], 2: [298, 300, 302], 4: [300, 299, 305]}, 1, 2, True),
        ({1: [300, 301, 299], 2: [298, 300, 302]}, 2, 1, True),
        # Too noisy to decide: the current setting stays.
        ({1: [100, 300, 200], 2: [150, 350, 220], 4: [100, 320, 210]}, 4, 4, False),
        # Noisy, but the current setting is far slower.
        ({1: [10, 11, 9], 2: [150, 350, 220], 4: [100, 320, 210]}, 1, 2, True),
        ({4: [5.0]}, 4, 4, True),
    ],
)
def test_choices(rates, before, value, clear):
    choice = choose(rates, before)
    assert (choice.value, choice.clear) == (value, clear)
    assert choice.rate == np.median(rates[value])


def test_thread_counts():
    assert thread_counts(1) == [1] and thread_counts(2) == [1, 2]
    assert thread_counts(6) == [1, 2, 4, 6] and thread_counts(16) == [1, 2, 4, 8, 16]


def labeled_images(files, hw_decoder_load=0.65, shard_id=0, num_shards=1):
    image, label = read_files(files, pad_last_batch=True, shard_id=shard_id, num_shards=num_shards)
    # Like a GPU graph that passes the value to its decoder, which requires 0 to 1.
    if not 0 <= hw_decoder_load <= 1:
        raise ValueError(f"hw_decoder_load={hw_decoder_load}")
    return fn.resize(fn.decoders.image(image), size=(16, 16)), label


LABELED_IMAGES = data_iterator(labeled_images, ["image", "x"], reader_name="reader")


def test_every_setting_is_measured_and_failures_are_excluded(jpegs):
    seen = []
    found = tune(
        LABELED_IMAGES,
        batch_size=4,
        seconds=0.1,
        num_threads=[1, 2],
        hw_decoder_load=[0.0, 2.0],
        prefetch_queue_depth=[1, 2],
        batch_sizes=[2],
        progress=lambda done, total, what: seen.append((done, total, what)),
        files=jpegs,
    )
    assert {name: sorted(rates) for name, rates in found.measured.items()} == {
        "num_threads": [1, 2, 4],
        "hw_decoder_load": [0.0, 0.65],
        "prefetch_queue_depth": [1, 2],
        "batch_size": [2, 4],
    }
    for rates in found.measured.values():
        assert all(len(own) == 3 and min(own) > 0 for own in rates.values())
    assert found.failures == ["hw_decoder_load=2.0: hw_decoder_load=2.0"]
    assert set(found.settings) == set(found.measured)
    begun = {"num_threads": 4, "hw_decoder_load": 0.65, "prefetch_queue_depth": 2, "batch_size": 4}
    gains = [
        np.median(rates[found.settings[name]]) / np.median(rates[begun[name]])
        for name, rates in found.measured.items()
    ]
    assert found.rate > 0
    np.testing.assert_allclose(found.rate / found.before, np.prod(gains))
    assert seen[0] == (0, 30, "num_threads=1") and seen[-1] == (30, 30, "done")
    assert found.line.startswith("iterator = labeled_images(..., num_threads=")
    for name, value in found.settings.items():
        shown = f"{value} (kept)" if name in found.unchanged else f"**{value}**"
        assert f"| {name} | {shown} |" in found.table()
        assert {*found.memory[name]} == {*found.measured[name]}
    # The printed line works.
    scope = {"labeled_images": LABELED_IMAGES}
    exec(found.line.replace("...", f"files={jpegs!r}"), scope)  # noqa: S102 - made above
    assert next(scope["iterator"])["image"].shape == (found.settings["batch_size"], 16, 16, 3)
    scope["iterator"].close()


def test_no_measurement_starts_after_the_time_limit(jpegs):
    seen = []
    found = tune_within(
        LABELED_IMAGES,
        batch_size=4,
        seconds=0.1,
        max_seconds=0.0,
        num_threads=[2],
        progress=lambda done, total, what: seen.append(what),
        files=jpegs,
    )
    assert found.measured == {} and seen == ["done"]
    assert [line.split(":")[0] for line in found.failures] == [
        "num_threads was not tried",
        "hw_decoder_load was not tried",
        "prefetch_queue_depth was not tried",
    ]
    assert not found.clear and found.settings["num_threads"] == 4
    assert found.summary == "Nothing was measured: pass more max_seconds."
    assert {*found.unchanged} == {*found.settings} - {"batch_size"}


def test_failing_current_settings_are_an_error(jpegs):
    wrong = data_iterator(
        functools.partial(labeled_images, hw_decoder_load=3.0), ["image", "x"], reader_name="reader"
    )
    with pytest.raises(ValueError, match="hw_decoder_load=3"):
        tune(wrong, batch_size=4, seconds=0.1, files=jpegs)
    with pytest.raises(TypeError, match="Decorate it with dalijax.data_iterator"):
        tune(labeled_images, batch_size=4)


@pytest.mark.parametrize(
    "default,first", ((0.9, 0.9), (None, 0.65), (inspect.Parameter.empty, 0.65))
)
def test_the_functions_settings_are_measured_first(jpegs, default, first):
    seen = []

    def graph(hw_decoder_load):
        seen.append(hw_decoder_load)
        return labeled_images(jpegs, hw_decoder_load)

    if default is not inspect.Parameter.empty:
        graph.__defaults__ = (default,)
    found = tune(
        data_iterator(graph, ["image", "x"], reader_name="reader"),
        batch_size=4,
        seconds=0.05,
        num_threads=[2],
        hw_decoder_load=[0.0],
        prefetch_queue_depth=[2],
    )
    assert seen[0] == first
    assert list(found.measured["hw_decoder_load"]) == [0.0, first]


RATES = {"num_threads": {1: [9, 10, 11], 2: [19, 20, 21]}, "batch_size": {8: [14, 20, 26]}}


def tuned(rate=20.0, before=10.0):
    return Tuned(
        "train",
        {"num_threads": 2, "batch_size": 8},
        rate,
        before,
        RATES,
        {"num_threads": {1: Memory(10.0), 2: Memory(1200.4, 30.0)}, "batch_size": {8: Memory(7.0)}},
        ["batch_size"],
        began={
            "num_threads": 4,
            "batch_size": 8,
            "prefetch_queue_depth": 2,
        },  # the last setting was not tried
    )


def test_the_table_marks_the_choice():
    assert tuned().table().splitlines()[2:] == [
        "| num_threads | 1 | 10 | 10 MiB | 9, 10, 11 |",
        "| num_threads | **2** | 20 | 1,200 MiB, GPU 30 MiB | 19, 20, 21 |",
        "| batch_size | 8 (kept) | 20 | 7 MiB | 14, 20, 26 |",
    ]
    assert tuned().line == "iterator = train(..., num_threads=2, batch_size=8)"


@pytest.mark.parametrize(
    "rate,before,summary",
    [
        (1410.0, 1000.0, "1,410 samples/s, 41 % more than the 1,000 with num_threads=4."),
        (900.0, 1000.0, "900 samples/s, 10 % less than the 1,000 with num_threads=4."),
        (1010.0, 1000.0, "1,010 samples/s, as fast as with num_threads=4."),
    ],
)
def test_the_gain_is_a_sentence(rate, before, summary):
    assert tuned(rate, before).summary == summary


def test_unchanged_settings_are_reported():
    found = tuned()
    found.began = dict(found.settings)
    assert found.summary == "20 samples/s, with the initial settings."


def test_the_plot_has_a_title_and_a_legend_and_marks_the_choice(tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        tuned().save_plot(tmp_path / "plot.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "plot.svg").getroot()
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert f"train: {tuned().summary}" in texts
    for words in ("each round", "median", "num_threads", "batch_size"):
        assert words in texts
    assert "chosen: 2" in texts and "kept: 8" in texts


def test_a_missing_matplotlib_raises_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="the plot needs matplotlib: pip install matplotlib"):
        main(["no_such_module:train", "--batch-size", "4", "--plot", "plot.png"])
    with pytest.raises(ImportError, match="the plot needs matplotlib"):
        tuned().save_plot("plot.png")


def test_the_memory_of_deeper_queues_is_more():
    def graph():
        return fn.random.uniform(range=(0.0, 1.0)) + np.zeros(1 << 18, np.float32)

    found = tune(
        data_iterator(graph, ["x"], size=64),
        batch_size=8,  # 8 MiB
        seconds=0.05,
        num_threads=[4],
        prefetch_queue_depth=[1, 2, 8],
    )
    memory = {value: one.host for value, one in found.memory["prefetch_queue_depth"].items()}
    assert memory[8] > memory[1] + 3 * 8
    assert all(one.gpu is None for one in found.memory["prefetch_queue_depth"].values())


def test_a_progress_bar_is_shown(jpegs, capsys):
    call = dict(batch_size=4, seconds=0.05, num_threads=[4], hw_decoder_load=[0.65], files=jpegs)
    tune(LABELED_IMAGES, prefetch_queue_depth=[2], **call)
    shown = capsys.readouterr().err.split("\r")[1:]
    assert len(shown) == 10 and shown[0].startswith("[" + " " * 30 + "] 0/9 num_threads=4")
    assert shown[-1].startswith("[" + "#" * 30 + "] 9/9 done") and shown[-1].endswith("\n")
    tune(LABELED_IMAGES, prefetch_queue_depth=[2], progress=None, **call)
    assert capsys.readouterr().err == ""


def test_the_docs_and_the_docstring_agree():
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "seeing.md"
    command = r"python -m dalijax\.tune my_data:train --batch-size \d+ (--arg data_dir=\S+)"
    arguments = [re.search(command, text)[1] for text in (page.read_text(), dalijax.tune.__doc__)]
    assert arguments == ["--arg data_dir=imagenet/train"] * 2


def test_shardings(jpegs):
    sharding = rows_over(2)
    found = tune(
        LABELED_IMAGES,
        batch_size=4,
        seconds=0.05,
        num_threads=[1],
        hw_decoder_load=[0.65],
        prefetch_queue_depth=[2],
        files=jpegs,
        sharding=sharding,
    )
    assert found.rate > 0 and found.settings["batch_size"] == 4


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    for number in range(8):
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / f"{number}.jpg")
    (tmp_path / "my_data.py").write_text(
        """
from nvidia.dali import fn
from dalijax import data_iterator

@data_iterator(output_map=["images"], reader_name="reader")
def train(folder, side=8):
    files = [f"{k}.jpg" for k in range(8)]
    image, _ = fn.readers.file(file_root=folder, files=files, name="reader")
    return fn.resize(fn.decoders.image(image), size=(side, side))
"""
    )
    command = ["my_data:train", "--batch-size", "4"]
    command += [
        "--arg",
        f"folder={tmp_path}",
        "--arg",
        "side=12",
        "--seconds",
        "0.05",
        "--max-seconds",
        "inf",
    ]
    command += ["--threads", "1,2", "--plot", "tune.png"]
    # Like `python -m dalijax.tune`, which imports from the current folder.
    program = (
        "import runpy, sys\nsys.path[0] = ''\nrunpy.run_module('dalijax.tune', None, '__main__')"
    )
    done = run_fork(program, *command, cwd=tmp_path, modules=["matplotlib.figure"])
    assert "| num_threads |" in done.stdout and "iterator = train(..., num_threads=" in done.stdout
    assert "prefetch_queue_depth=4" in done.stderr  # the progress bar
    assert "memory" in done.stdout and "MiB" in done.stdout
    assert re.findall(r"\| num_threads \| \W*(\d+)", done.stdout) == ["1", "2", "4"]
    low, high = Image.open(tmp_path / "tune.png").convert("L").getextrema()
    assert high - low > 50
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for wrong, words in (
        ("my_data", "write module:function"),
        ("my_data:nothing", f"can't be loaded from {tmp_path}"),
        ("my_data:fn", "Decorate it with dalijax.data_iterator"),
    ):
        with pytest.raises(SystemExit, match=re.escape(words)):
            main([wrong, *command[1:]])
    with pytest.raises(SystemExit) as failed:
        main(command[: command.index("--arg")])
    needed = "train() needs more arguments: pass --arg folder=VALUE, or --source PATH"
    assert failed.value.code == f"{needed} if they are fields of records"
