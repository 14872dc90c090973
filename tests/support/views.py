"""The views of SimCLR, BYOL and DINO, as graphs and as settings for other implementations.

Settings of Chen et al., A Simple Framework for Contrastive Learning of
Visual Representations (2020), appendix A; Grill et al., Bootstrap Your Own Latent (2020), appendix
B; Caron et al., Emerging Properties in Self-Supervised Vision Transformers (2021), whose released
code has these crops. Its blur is Pillow's, and the kernel here is DINOv2's.
"""

import dataclasses

from dalijax import augment


@dataclasses.dataclass(frozen=True)
class View:
    """Settings of a view: probabilities, and ranges as in `dalijax.augment`."""

    size: int
    scale: tuple
    jitter: dict
    kernel_size: int
    blur: float
    solarize: float = 0.0


def jitter(brightness, contrast, saturation, hue):
    return {
        "brightness": brightness,
        "contrast": contrast,
        "saturation": saturation,
        "hue": hue,
    }


STRONG, WEAK = jitter(0.8, 0.8, 0.8, 0.2), jitter(0.4, 0.4, 0.2, 0.1)
SIMCLR = View(224, (0.08, 1.0), STRONG, 23, blur=0.5)
BYOL = View(224, (0.08, 1.0), WEAK, 23, blur=1.0)
GLOBAL, LOCAL = (View(224, (0.4, 1.0), WEAK, 9, 1.0), View(96, (0.05, 0.4), WEAK, 9, 0.5))
VIEWS = {
    "simclr": [SIMCLR, SIMCLR],
    "byol": [BYOL, dataclasses.replace(BYOL, blur=0.1, solarize=0.2)],
    "dino": [GLOBAL, dataclasses.replace(GLOBAL, blur=0.1, solarize=0.2), *[LOCAL] * 6],
}


def crop(images, draw, settings, name):
    return augment.random_resized_crop(
        images, settings.size, scale=settings.scale, flip=0.5, draw=draw, name=f"{name}.crop"
    )


def view(images, draw, settings, name):
    """Returns a view; its draws are named crop, jitter, gray, blur and solarize after its name."""
    images = crop(images, draw, settings, name)
    images = augment.color_jitter(
        images, **settings.jitter, probability=0.8, draw=draw, name=f"{name}.jitter"
    )
    images = augment.grayscale(images, probability=0.2, draw=draw, name=f"{name}.gray")
    images = augment.gaussian_blur(
        images, settings.kernel_size, probability=settings.blur, draw=draw, name=f"{name}.blur"
    )
    if settings.solarize:
        images = augment.solarize(
            images, 128, probability=settings.solarize, draw=draw, name=f"{name}.solarize"
        )
    return images
