"""Compares how libraries pack images of native resolution into rows of tokens.

The sizes are random, like those of ImageNet. An image has as many tokens as its grid of patches of
16 x 16: that of `dalijax.augment.patches`, or that of its own size, up to a limit. Every packer
gets the same lengths, except timm, which resizes all images.

Runs are interrupted in the middle of an epoch, and resumed in a new process, by the iterators of
the libraries. Then each packer packs epochs in a process of its own, and the CPU time of packing is
measured. dalijax, NeMo and timm only plan the rows. Grain also copies the tokens, an int32 each,
so that its CPU time can't be compared with the others; reading the images is subtracted::

    python benchmarks/packed_rows.py --nemo ../NeMo

All packers pack the first images of ``--subset``, because NeMo's time is quadratic. NeMo packs
before a run, so all runs share the rows of one seed. Megatron-Energon is not compared, since its
CPU time was negative after the reading was subtracted.

NeMo is left out without ``--nemo``, the folder of a checkout. timm runs in a virtual environment,
``.venv-resume-timm``, which the program creates.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from packers.protocol import Job
from resume import free_port, python_of

import report
from dalijax.core.augment.patches import grids

HERE = pathlib.Path(__file__).resolve().parent
IMAGENET = 1_281_167  # images of the training set
PATCH = 16


@dataclasses.dataclass(frozen=True)
class Variant:
    """A packer with settings.

    Attributes:
        module: Module of the package `packers`.
        environment: Environment of `resume.python_of`.
        name: Class of the module.
        options: Options of the class.
        images: Option of the program that is the number of images.
        work: What is measured: the planning of rows, or also the copying of tokens.
        resumes: Whether runs are resumed.
    """

    module: str
    environment: str = "project"
    name: str = "Packer"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    images: str = "subset"
    work: str = "plan"
    resumes: bool = True


def of_grain(**options: Any) -> Variant:
    """Returns a transformation of Grain; a run with best fit resumes as a run with first fit."""
    resumes = options != {"kind": "best", "bins": 64}
    return Variant("grain_pack", options=options, work="plan and copy", resumes=resumes)


PACKERS = {
    "one image per row": Variant("planned", name="Single", resumes=False),
    "dalijax": Variant("planned"),
    "dalijax, all images": Variant("planned", images="images", resumes=False),
    "Grain, first fit, 64 bins": of_grain(kind="first", bins=64),
    "Grain, best fit, 64 bins": of_grain(kind="best", bins=64),
    "Grain, best fit, 1,024 bins": of_grain(kind="best", bins=1024),
    "Grain, concatenate and split": of_grain(kind="concat"),
    "NeMo, first fit, shuffled": Variant("nemo", options={"kind": "shuffle"}, resumes=False),
    "NeMo, first fit, decreasing": Variant("nemo", options={"kind": "decreasing"}),
    "timm, resizes all": Variant("timm_naflex", "timm", options={"parts": [1]}),
    "timm, resizes all, 3 lengths": Variant(
        "timm_naflex", "timm", options={"parts": [1, 2, 4]}, resumes=False
    ),
}


@dataclasses.dataclass(frozen=True)
class Limit:
    """A rule for the number of tokens of an image."""

    tokens: int
    enlarge: bool

    @property
    def title(self) -> str:
        return f"{'resized to' if self.enlarge else 'up to'} {self.tokens:,}"


LIMITS = (Limit(1024, False), Limit(256, True))
ROWS = (4096, 1024)
PROBLEMS = ("lost", "split", "repeated", "cut")


def draw_sizes(count: int, seed: int = 0) -> NDArray[np.int32]:
    """Returns heights and widths in pixels, [count, 2], distributed like those of ImageNet."""
    generator = np.random.default_rng(seed)
    area = np.exp(generator.normal(np.log(500 * 375), 0.7, count))
    aspect = np.exp(generator.normal(0.15, 0.35, count))
    return np.stack([np.sqrt(area / aspect), np.sqrt(area * aspect)], 1).astype(np.int32)


def token_counts(sizes: NDArray[np.int32], limit: Limit) -> NDArray[np.int32]:
    """Returns the number of patches of each image, int32 [images]."""
    grid = grids(sizes, PATCH, limit.tokens)
    if not limit.enlarge:
        grid = np.minimum(grid, -(-sizes // PATCH))
    return grid.prod(axis=1).astype(np.int32)


def run(variant: Variant, job: Job | Sequence[Job], task: str, **arguments: Any) -> dict[str, Any]:
    """Runs a task of ``packers.worker`` in a new process."""
    jobs = [job] if isinstance(job, Job) else job
    message = {
        "module": variant.module,
        "class": variant.name,
        "options": variant.options,
        "jobs": [dataclasses.asdict(job) for job in jobs],
        "task": task,
        **arguments,
    }
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    # One thread, so that the CPU time does not contain waiting threads of a BLAS.
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python_of(variant.environment), "-m", "packers.worker"],
        input=json.dumps(message),
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{variant.module} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def delivered(batches: Sequence[Any]) -> collections.Counter[int]:
    """Returns the number of delivered tokens of each image."""
    counts: collections.Counter[int] = collections.Counter()
    for image, tokens in itertools.chain.from_iterable(itertools.chain.from_iterable(batches)):
        counts[image] += tokens
    return counts


def merge(processes: Sequence[Sequence[Any]]) -> list[Any]:
    """Joins the rows of each batch of all processes, sorted, since their order has no effect."""
    return [sorted(itertools.chain.from_iterable(parts)) for parts in zip(*processes)]


def resume(variant: Variant, job: Job, middle: int) -> dict[str, Any]:
    """Interrupts a run after some batches, and resumes it in a new process.

    Args:
        variant: The packer.
        job: The run with one process.
        middle: Number of batches before the interruption.

    Returns:
        Whether the packer has a state, whether the batches after the interruption equal those of an
        uninterrupted run, the images read and the CPU seconds until the first batch of a new and of
        the resumed run, whether two processes deliver the same batches as one, and the images that
        are repeated and lost if one process resumes a run of two.
    """
    deliver = functools.partial(run, variant, task="deliver")
    new = deliver(job, states=[], skip=0, count=None)
    killed = deliver(job, states=[], skip=0, count=middle)
    resumed = deliver(job, states=[killed["state"]], skip=middle, count=None)
    jobs = [
        dataclasses.replace(job, processes=2, process=number, port=port)
        for port in [free_port()]
        for number in range(2)
    ]
    part_of = functools.partial(deliver, states=[], skip=0, count=middle)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # the processes may connect
        two = list(pool.map(part_of, jobs))
    states = [part["state"] for part in two]
    one = deliver(job, states=states, skip=middle, count=None)
    merged = merge([part["batches"] for part in two])
    before, after = delivered(merged), delivered(one["batches"])
    lengths = np.load(job.lengths)[: job.images]
    found = np.array([before[image] + after[image] for image in range(job.images)])
    return {
        "state": killed["state"],
        "equal": resumed["batches"] == new["batches"][middle:],
        "reads": {"new": new["reads"], "resumed": resumed["reads"]},
        "seconds": {"new": new["seconds"], "resumed": resumed["seconds"]},
        "2 processes": merged == merge([new["batches"][:middle]]),
        "2 to 1": {
            "repeated": int((found > lengths).sum()),
            "lost": int((found < lengths).sum()),
        },
    }


def microseconds(result: Mapping[str, Any]) -> list[float]:
    """Returns the CPU time per image of each round, in microseconds."""
    return [1e6 * seconds / result["images"] for seconds in result["seconds"]]


def print_packing(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Prints a table of the packers and a table of all packings, and returns the plot's values."""
    packers: dict[str, list[Mapping[str, Any]]] = {}
    details = []
    plot: dict[str, dict[str, float]] = {}
    for result in results:
        packers.setdefault(result["packer"], []).append(result)
        padding = 100 * result["padding"]
        plot.setdefault(f"{result['title']} tokens", {})[result["packer"]] = padding
        details.append(
            [
                result["title"],
                result["packer"],
                f"{result['slots per image']:.0f}",
                report.spread(microseconds(result), 1),
                ", ".join(f"{result[key]:,} {key}" for key in PROBLEMS if result[key])
                or "all once",
            ]
        )
    rows = []
    for packer, own in packers.items():
        times = [value for result in own for value in microseconds(result)]
        paddings = [f"{100 * result['padding']:.1f}" for result in own]
        work = PACKERS[packer].work
        images = f"{own[0]['images']:,}"
        rows.append([packer, images, *paddings, work, report.spread(times, 1)])
    titles = list(plot)
    report.table(["packer", "images", *titles, "measured work", "CPU us per image"], rows)
    columns = ["images in rows", "packer", "tokens per image", "CPU us per image"]
    report.table([*columns, "images of an epoch"], details)
    return plot


def print_resumes(resumes: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the table of the resumed runs."""
    rows = []
    for name, result in resumes.items():
        reads, seconds, moved = result["reads"], result["seconds"], result["2 to 1"]
        problems = [f"{moved[key]:,} {key}" for key in ("repeated", "lost") if moved[key]]
        rows.append(
            [
                name,
                "no" if result["state"] is None else f"{len(result['state'])} bytes",
                "yes" if result["equal"] else "no",
                f"{reads['new']:,}",
                f"{reads['resumed']:,}",
                f"{seconds['resumed']:.2f}",
                "yes" if result["2 processes"] else "no",
                ", ".join(problems) or "all once",
            ]
        )
    columns = ["packer", "state", "same batches", "images read, new run", "images read, resumed"]
    columns += ["CPU s, resumed", "same batches by 2 processes", "images, 2 to 1 processes"]
    report.table(columns, rows)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--images", type=int, default=IMAGENET, help="of dalijax alone")
    parser.add_argument("--subset", type=int, default=5_000, help="images of all packers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--middle", type=int, default=31, help="batches before the interruption")
    parser.add_argument("--nemo", type=pathlib.Path, help="folder of a checkout of NeMo")
    parser.add_argument("--packer", nargs="+", choices=PACKERS, default=list(PACKERS))
    args = parser.parse_args()
    variants = {name: PACKERS[name] for name in args.packer}
    if args.nemo:
        os.environ["PACKING_NEMO"] = str(args.nemo.resolve())
    else:
        variants = {name: part for name, part in variants.items() if part.module != "nemo"}
    report.heading()
    with tempfile.TemporaryDirectory() as folder:
        resumes, results, elastic = measure_all(variants, args, pathlib.Path(folder))
    plot = print_packing(results)
    print_resumes(resumes)
    print(f"Grain's ElasticIterator over packed rows: {elastic}")
    report.write(
        args.out,
        "packed_rows",
        {"packing": results, "resumes": resumes, "elastic": elastic},
        plot,
        "padding, %",
    )


def measure_all(
    variants: Mapping[str, Variant], args: argparse.Namespace, folder: pathlib.Path
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Returns the resumed runs, the packings, and the error of Grain's ElasticIterator."""
    sizes = draw_sizes(max(args.images, args.subset))
    np.save(folder / "sizes.npy", sizes)
    jobs = []
    for limit in LIMITS:
        lengths = folder / f"lengths-{limit.tokens}.npy"
        np.save(lengths, token_counts(sizes, limit))
        for row in ROWS:
            files = str(lengths), str(folder / "sizes.npy")
            jobs.append((limit, Job(*files, args.subset, row, limit.tokens)))
    job = jobs[0][1]
    resumes = {}
    for name, variant in variants.items():
        if variant.resumes:
            resumes[name] = resume(variant, job, args.middle)
            print(name, resumes[name], flush=True)
    grain = next((part for part in variants.values() if part.module == "grain_pack"), None)
    elastic = run(grain, job, "elastic")["error"] if grain else ""
    results = []
    for name, variant in variants.items():
        images = getattr(args, variant.images)
        sized = [dataclasses.replace(job, images=images) for _, job in jobs]
        measured = run(variant, sized, "measure", rounds=args.rounds)
        for (limit, job), result in zip(jobs, measured["packings"]):
            title = f"{limit.title}, in {job.row:,}"
            results.append({"title": title, "packer": name, **result})
        versions = measured["versions"]
        print(
            name, [f"{100 * part['padding']:.2f} %" for part in results[-4:]], versions, flush=True
        )
    return resumes, results, elastic


if __name__ == "__main__":
    main()
