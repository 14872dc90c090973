"""NeMo's packing of sequences before a run, as ``prepare_packed_ft_dataset.py`` calls it.

https://github.com/NVIDIA/NeMo/blob/main/nemo/utils/sequence_packing_utils.py is loaded from a
checkout of NeMo without installing the library. The strategy is made from a histogram of lengths,
and NumPy's global random generator. ``PACKING_NEMO`` is the folder of the checkout.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from packers import protocol
from packers.protocol import Packing, Row, packing_of, parts_of

ALGORITHMS = {"shuffle": "first_fit_shuffle", "decreasing": "first_fit_decreasing"}


@functools.cache
def module() -> Any:
    """Returns NeMo's module; its only import from NeMo is the logger."""
    path = pathlib.Path(os.environ["PACKING_NEMO"]) / "nemo" / "utils" / "sequence_packing_utils.py"
    utils: Any = types.ModuleType("nemo.utils")
    utils.logging = logging.getLogger("nemo")
    sys.modules |= {"nemo": types.ModuleType("nemo"), "nemo.utils": utils}
    spec = importlib.util.spec_from_file_location("sequence_packing_utils", path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class Packer(protocol.Packer):
    """A packing algorithm of NeMo: "shuffle" or "decreasing"."""

    stateful = False
    packages = ("numpy",)

    def __init__(self, job: protocol.Job, **options: Any) -> None:
        super().__init__(job, **options)
        module()

    def work(self) -> Any:
        np.random.seed(self.job.seed)
        histogram = np.bincount(self.lengths, minlength=self.job.row + 1).tolist()
        algorithm = ALGORITHMS[self.options["kind"]]
        return module().create_packing_strategy(histogram, self.job.row, algorithm)[0]

    def rows(self, strategy: Any) -> list[Any]:
        """Returns the rows of tokens of a strategy, with padding."""
        images = [
            # NeMo removes the last token, since it packs the inputs and labels of a decoder.
            {"input_ids": [number + 1] * (length + 1), "loss_mask": [True] * (length + 1)}
            for number, length in enumerate(self.lengths.tolist())
        ]
        sequences, _ = module().create_hist(images, self.job.row)
        filled = module().fill_packing_strategy(strategy, sequences, self.job.row, 0)
        rows = []
        for item in filled:
            # Each sequence still has its last token.
            ids = np.array(item["input_ids"])
            last = np.array([*item["seq_start_id"][1:], len(ids)]) - 1
            row = np.delete(ids, last)
            rows.append(np.pad(row, (0, self.job.row - len(row))))
        return rows

    def packing(self, result: Any) -> Packing:
        return packing_of(self.rows(result), self.lengths)

    def batches(self) -> Iterator[list[Row]]:
        rows = [parts_of(row) for row in self.rows(self.work())]
        self.reads += len(self.lengths)
        for first in range(0, len(rows), self.job.batch):
            start = first + self.job.process * self.job.rows
            yield rows[start : start + self.job.rows]
