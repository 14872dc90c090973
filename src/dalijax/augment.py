"""Random augmentation in a graph, with random numbers that depend only on the record.

The augmentation of an image is a function of (seed, epoch, record, name). It does not depend on
batches, shards or devices, and is equal after a restore. Each function takes the graph's ``draw``::

    from dalijax import augment

    def train(data, label, *, draw):
        images = fn.decoders.image(data, device="mixed")
        images = augment.random_resized_crop(images, 224, flip=0.5, draw=draw)
        return augment.color_jitter(images, brightness=0.3, draw=draw), label

`center_crop` and `normalize` are not random: they need no draw, and work in any graph.
"""

import typing as _typing

from .core.augment.auto import auto_augment as auto_augment
from .core.augment.auto import rand_augment as rand_augment
from .core.augment.auto import trivial_augment as trivial_augment
from .core.augment.colors import color_jitter as color_jitter
from .core.augment.colors import gaussian_blur as gaussian_blur
from .core.augment.colors import grayscale as grayscale
from .core.augment.colors import solarize as solarize
from .core.augment.crops import center_crop as center_crop
from .core.augment.crops import flip as flip
from .core.augment.crops import random_crop as random_crop
from .core.augment.crops import random_erasing as random_erasing
from .core.augment.crops import random_resized_crop as random_resized_crop
from .core.augment.normalization import normalize as normalize
from .core.augment.patches import PatchWindow as PatchWindow
from .core.augment.patches import patch_window as patch_window
from .core.augment.patches import patches as patches
from .core.augment.window import Window as Window
from .core.augment.window import affine_window as affine_window
from .core.augment.window import center_window as center_window
from .core.augment.window import crop_window as crop_window
from .core.augment.window import fit_window as fit_window
from .core.augment.window import iou_window as iou_window
from .core.augment.window import random_window as random_window
from .core.augment.window import resize_window as resize_window
from .core.augment.window import scale_window as scale_window
from .core.messages import replacements as _replacements

__all__ = [
    "PatchWindow",
    "Window",
    "affine_window",
    "auto_augment",
    "center_crop",
    "center_window",
    "color_jitter",
    "crop_window",
    "fit_window",
    "flip",
    "gaussian_blur",
    "grayscale",
    "iou_window",
    "normalize",
    "patch_window",
    "patches",
    "rand_augment",
    "random_crop",
    "random_erasing",
    "random_resized_crop",
    "random_window",
    "resize_window",
    "scale_window",
    "solarize",
    "trivial_augment",
]

if not _typing.TYPE_CHECKING:  # type checkers would accept misspelled names

    def __getattr__(name: str) -> _typing.Any:
        raise _replacements.no_attribute("dalijax.augment", name, __all__, _replacements.AUGMENT)
