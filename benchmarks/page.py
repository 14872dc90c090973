"""Makes docs/benchmarks.md, benchmarks-more.md and their plots of the runs in benchmarks/results.

For each question it takes the newest run of that name and kind of machine: its tables as they were
printed, its plot, the command, the machine and the date. Remarks are written here, by hand::

    python benchmarks/page.py
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"

# Heading, kind of machine and name of the run that answers it, and what to say of it.
QUESTIONS: list[tuple[str, str, str, str]] = [
    (
        "How many images a second on one GPU?",
        "h200",
        "throughput",
        "JPEGs of 500x375 are decoded, cropped at random to 224, mirrored and normalised to f16. "
        "Shares are of DALI's own loop in the same round. The run's time ended early in the third "
        "round, so most rows are of two. A ResNet-50 was trained on the other GPU and its cores "
        "meanwhile. Runs differ: in four of them `Files` had 1.09 to 1.32 of DALI's loop, `Tar` "
        "1.11 to 1.22, `Mixture` 0.97 to 1.21, and packed bytes 0.80 to 0.94. DALI's plugin had "
        "0.77 and 1.02 in the rounds of this one, and 0.98 to 1.03 in the others. OpenCV had 0.33 "
        "in one other, and slower programs of it 0.11 to 0.22. On another machine `Tar` had 1.29 "
        "and `Mixture` 1.24; with four threads that read, as they had before, 1.13 and 1.07.",
    ),
    (
        "How fast are the other ways from Grain?",
        "h200",
        "throughput-grain",
        "The same pictures. What holds back the slow rows is Python: Grain spends about 70 us on "
        "a record in one interpreter. Workers that hand over packed bytes are the fast way.",
    ),
    (
        "What does it cost a training step?",
        "h200",
        "training",
        "A ResNet-50 in bfloat16, batches of 256. Waiting is the time in which the GPU had no step "
        "to run. CUDA had 32 hardware queues, as `import dalijax` sets them. With CUDA's default "
        "of 8 a step took 43.8 ms, and 7.3 % of it was waiting.",
    ),
    (
        "What does a whole recipe cost a ResNet-50?",
        "h200",
        "recipe-resnet50",
        "The steps of `examples/imagenet` with more and more augmentation, beside the model "
        "alone. Each row has what is above it, too, and the one with erasing and mixing has "
        "everything. AutoAugment has RandAugment's place; the row below it reads one tar. DALI "
        "decodes on the GPU, by eight threads. OpenCV, in 14 workers, and tf.data decode on 16 "
        "cores, and have crop, flip and jitter alone. A ViT-B/16 ran on the other GPU and its 16 "
        "cores at the same time. The run's time ended in the third round, before its turns of "
        "jitter, RandAugment, everything and OpenCV. OpenCV and tf.data kept up, with 13 of the "
        "cores, and cost less than DALI did. In three other runs of 2026-11-26 the model had "
        "flax's normalization, and took 37.7 to 37.9 ms alone. Over that jitter cost 2.6 to 2.9 "
        "%, everything 4.4 to 4.8, AutoAugment 5.2 and 5.6, and a tar 4.7 and 5.2. By the "
        "programs of this table OpenCV cost 32.4 % in one of them, and tf.data 0.1; why OpenCV "
        "cost so much is not known. The model of this table has an earlier form of today's "
        "[layer](imagenet.md#several-gpus), with an axis of one group. It reads and writes 1.6 % "
        "more bytes, as compiled without a GPU; whether that is the whole difference is not "
        "known. Without that axis, as it is today, XLA makes of it what it makes of flax's layer. "
        "In four runs on H100s, all by older programs, jitter cost 2.8 to 4.1 %, and everything "
        "4.5 to 6.4 %. A ResNet-50 takes a sixth fewer images a second there.",
    ),
    (
        "What does the recipe cost a ViT-S/16?",
        "h200",
        "recipe-vit_s16",
        "At the same time as a ResNet-50, on the other GPU of that machine, and in another order. "
        "The run's time ended in the third round, before its turns of crop and flip, AutoAugment, "
        "and everything. OpenCV cost 0.3, 1.0 and 21.7 % in its rounds. On another H200 it cost "
        "22.5 %, tf.data 0.9, jitter 2.9, and everything 4.7. In four runs on H100s jitter cost "
        "3.3 to 3.8 %, RandAugment 4.4 to 5.3 %, and everything 4.7 to 6.5 %. In the rounds of "
        "another run, which was not kept, jitter cost 4.7 and 10.4 %.",
    ),
    (
        "What does the recipe cost a ViT-B/16?",
        "h200",
        "recipe-vit_b16",
        "The same inputs, at the same time as the ResNet-50 of the [first page](benchmarks.md), "
        "on the other GPU; two rounds. Decoding on the cores is the cheapest here: it leaves the "
        "GPU alone, and about six cores decode 2,900 images a second. OpenCV's and tf.data's rows "
        "are 0.9 % below the model alone, whose two rounds are as far apart, so that a difference "
        "of 1 % means nothing. In two other runs of 2026-11-26 jitter cost 0.2 and 0.4 %, "
        "RandAugment 1.3 and 1.1 %, and everything 1.6 and 1.8 %. In two runs on H100s jitter "
        "cost 0.7 and 2.0 %, RandAugment 1.4 and 2.9 %, and everything 1.6 and 3.4 %.",
    ),
    (
        "What does the recipe cost on two GPUs in one process?",
        "h200x2",
        "recipe-resnet50",
        "A ResNet-50, batches of 512 over both. OpenCV and tf.data have 32 cores. The run's time "
        "ended in the third round, before its turns of RandAugment and everything. The "
        "normalization took moments of [256 pictures](imagenet.md#several-gpus). In three other "
        "runs of 2026-11-26 it was flax's, of the whole batch, for which the GPUs wait for each "
        "other in each of 53 layers. The model alone took 39.5 to 40.1 ms then, and with "
        "everything 42.3 to 42.6 ms. Jitter cost 2.5, 3.9 and 3.9 %, and everything 5.6, 6.9 and "
        "8.0 %. In one of them OpenCV cost 5.5 %, and tf.data 5.7. In four runs on H100s, with "
        "those moments too, jitter cost 1.8 to 4.0 %, and everything 4.9 to 7.8 %, or 9.8 in one "
        "round. On another machine everything cost 4.8 and 5.5 % without CUDA graphs, see "
        "[performance](performance.md#cuda-graphs).",
    ),
    (
        "What does it cost with a process for each of the two GPUs?",
        "h200x2",
        "recipe-resnet50-2-processes",
        "Batches of 256 in each process, on the machine of the table above; two rounds, and three "
        "of the model alone. In two runs on two H100, by older programs and with moments of the "
        "whole batch, jitter cost 3.0 and 3.5 %, and everything 6.3 and 6.5 %.",
    ),
    (
        "What does the recipe cost a ViT-S/16 on two GPUs in one process?",
        "h200x2",
        "recipe-vit_s16",
        "OpenCV and tf.data have 32 cores, of which tf.data kept 25 busy. The rows are of two "
        "rounds, and RandAugment of one. In two other runs of 2026-11-26 jitter cost 1.6 and 2.3 "
        "%, and everything 4.3 and 4.9 %. In one of them OpenCV cost 2.5 %, and tf.data 14.3; why "
        "14.3 is not known. In four runs on H100s jitter cost 2.0 to 3.3 % and everything 4.5 to "
        "6.0 %. Without CUDA graphs the model alone took 51.4 ms a step on another machine, with "
        "them 43.5. Everything cost 31 and 34 % without them, and 4.4 and 4.0 % with them.",
    ),
    (
        "What does it cost a ViT-S/16 with a process for each?",
        "h200x2",
        "recipe-vit_s16-2-processes",
        "Batches of 256 in each process, on another machine than above; two rounds, and three of "
        "jitter. In two runs on two H100, by older programs, jitter cost 2.5 and 3.1 %, and "
        "everything 5.1 and 7.2 %.",
    ),
    (
        "What does the recipe cost a ViT-B/16 on two GPUs in one process?",
        "h200x2",
        "recipe-vit_b16",
        "Batches of 512 over both, and 32 cores for OpenCV and tf.data; one round. Two rows are "
        "0.8 % below the model alone, so that a difference of 1 % means nothing. In one round of "
        "another run jitter was 0.6 % below it, and everything cost 1.3 %. On two H100, by an "
        "older program, jitter cost 0.8 %, and everything 2.7 %.",
    ),
    (
        "How do several GPUs scale?",
        "h200x4",
        "scaling",
        "A batch of 256 for each GPU, on one host. The ranges say how far such a figure can be "
        "trusted. Another host of two GPUs gave 1.68 times one, and a third was slower by half.",
    ),
    (
        "And over a tar, on two GPUs?",
        "h200x2",
        "scaling",
        "Two threads read for both GPUs. On other machines they gave 1.08 of the raw loops and, "
        "in five rounds, 1.27 (1.18 to 1.34); there one thread gave 1.06 and four 1.08. Each call "
        "that reads gives up Python's lock, and waits to have it back. With an advice to the "
        "kernel before each read, as it was before, two gave 1.08, one 0.97 and four 0.85.",
    ),
    (
        "What does next() cost?",
        "h200",
        "overhead",
        "Microseconds over a raw loop of DALI's own calls. On a GPU a batch takes 19 to 70 us "
        "more than DALI's plugin. In another run three of six were level. On a CPU `jax.Array`s "
        "take up to 1.8 times what the plugin does over the raw loop (490 and 265 us): these are "
        "not committed to their device.",
    ),
    (
        "What do the adapters add?",
        "cpu",
        "adapter_overhead",
        "Two outputs that cost next to nothing, 5 ms between batches. In brackets: over the raw "
        "loop.",
    ),
    (
        "What do functions in the graph cost?",
        "h200",
        "function_cost",
        "Behind the colon: the share of DALI's own form of the function in the same round. The "
        "older executors of DALI lose data here, see [functions](functions.md).",
    ),
    (
        "What does the augmentation cost?",
        "cpu",
        "augment",
        "Beside DALI's random operators of the same kind, in the same round.",
    ),
    (
        "How long does opening take?",
        "h200",
        "opening",
        "Records of 100 bytes that are not decoded. A tar is indexed once; `again` is a new "
        "process. Small records of a tar come a quarter as fast as from DALI's reader: Python "
        "costs about 20 us a record.",
    ),
    ("Does memory grow?", "h200", "memory", "New pipelines from a state every 2,000 batches."),
    (
        "How many images a second on a CPU?",
        "cpu",
        "throughput",
        "Two cores. OpenCV and tf.data are the fastest there, and resize without antialiasing; "
        "tf.data decodes only what is cropped. DALI's rows are antialiased but for two, and decode "
        "whole pictures but for one.",
    ),
    (
        "Recordings, clips and arrays beside the usual libraries?",
        "h200",
        "media",
        "16 cores. The GPU makes spectrograms, and crops volumes; FLAC and Motion JPEG are "
        "decoded on the cores. DALI is the slowest for H.264 on the GPU's video engines, which "
        "don't spare the cores either: 29 ms of a core for each clip, OpenCV 23 and PyAV 18. "
        "Motion JPEG goes faster by OpenCV, and faster still by PyAV, which decodes the wanted "
        "frames alone. NumPy is as fast with whole volumes, and faster with mapped ones and with "
        "rows of a table. Before the rounds each library was tried in several numbers of threads "
        "and processes, and works in the fastest. A process makes a share of each batch, or whole "
        "ones.",
    ),
    (
        "And on a CPU?",
        "cpu",
        "media",
        "Two cores. DALI is not the fastest in any of these. PyAV decodes the wanted frames of "
        "Motion JPEG alone. Rows of a table need next to no work, and take NumPy a tenth of the "
        "time.",
    ),
]
# Those of the first page; the others are on the second.
FIRST = ["throughput", "recipe-resnet50", "scaling", "overhead"]
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dalijax",
    "font.family": "sans-serif",
}  # the page's own font


def newest(kind: str, name: str) -> dict[str, Any] | None:
    """The newest run of a benchmark on such a machine."""
    files = sorted(RESULTS.glob(f"????-??-??-{kind}-{name}.json"))
    return json.loads(files[-1].read_text()) if files else None


def describe(machine: Mapping[str, Any]) -> str:
    """The machine and its versions in a line."""
    gpus = machine["gpus"]
    parts = [f"{len(gpus)} x {gpus[0]}"] if gpus else []
    parts.append(machine["cpu"])
    versions = {k: v for k, v in machine.items() if k not in ("date", "cpu", "gpus", "queues")}
    parts += [f"{name} {version}" for name, version in versions.items() if version]
    return ", ".join(parts)


def plot(run: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws a run's bars, one panel below the other, readable on a light and a dark page."""
    groups = {k: v for k, v in run["plot"]["groups"].items() if v}
    counts = [len(values) for values in groups.values()]
    figure = Figure(figsize=(7.5, 0.7 + 0.27 * sum(counts) + 0.55 * len(counts)))
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=counts)[:, 0]
    for ax, (title, values) in zip(axes, groups.items()):
        names = list(values)[::-1]
        bars = ax.barh(names, [values[name] for name in names], color="#76b900")
        digits = 0 if max(map(abs, values.values())) >= 100 else 1
        labels = ax.bar_label(bars, fmt=f"{{:,.{digits}f}}", padding=3, fontsize=8)
        ax.margins(x=0.14)
        ax.tick_params(labelsize=8, colors="#808080")
        ax.set_title(title, fontsize=9, color="#808080")
        ax.spines[["top", "right"]].set_visible(False)
        for part in (*ax.spines.values(), *labels):
            part.set_color("#808080")
    axes[-1].set_xlabel(run["plot"]["label"], fontsize=8, color="#808080")
    figure.tight_layout()
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, transparent=True, metadata={"Date": None})


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def section(question: str, kind: str, name: str, remark: str) -> str:
    """A question with the run that answers it; "" where there is none."""
    run = newest(kind, name)
    if run is None:
        return ""
    picture = f"pictures/benchmark-{kind}-{name}.svg"
    plot(run, DOCS / picture)
    parts = [f"## {question}", textwrap.fill(remark, 98, break_on_hyphens=False)]
    parts += [table(one["columns"], one["rows"]) for one in run["tables"]]
    parts.append(f"![{run['plot']['label']}]({picture})")
    where = f"{run['machine']['date']}, {describe(run['machine'])}. By `{run['command']}`."
    parts.append(textwrap.fill(where, 98, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(parts)


HEAD = """# Benchmarks

Every figure was printed by the command below its table, at that date, where nothing else is said.
The runs are kept in `benchmarks/results`, and `python benchmarks/page.py` makes this page of the
newest of each. Values are medians, with the least and the most of the rounds. Of runs before
2026-11-23, and of some of that day, the tables alone are kept. Shares and percent are medians over
the rounds, too, of what each round had; those of media, augmentation and functions have their
quartiles. Variants take turns in one process, so that what disturbs one disturbs all. What is said
of other runs is in the history of this page, or was not kept. [More benchmarks](benchmarks-more.md)
are on a page of their own."""
HEAD_MORE = """# More benchmarks

Grain's other ways, training, recipes, adapters, functions, augmentation, opening, memory, CPUs, and
media that are not photographs.
The first page says how all of them were [measured](benchmarks.md)."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    (DOCS / "pictures").mkdir(parents=True, exist_ok=True)
    pages: dict[str, list[str]] = {"benchmarks": [HEAD], "benchmarks-more": [HEAD_MORE]}
    for question, kind, name, remark in QUESTIONS:
        first = name in FIRST and not kind.endswith("x2")
        pages["benchmarks" if first else "benchmarks-more"].append(
            section(question, kind, name, remark)
        )
    for page, sections in pages.items():
        text = "\n\n".join(filter(None, sections)) + "\n"
        (DOCS / f"{page}.md").write_text(re.sub(r"[ \t]+\n", "\n", text))


if __name__ == "__main__":
    main()
