"""The class of configurations. The other modules of this package define a `config`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """A model, its optimizer and its input. Lengths are in pixels."""

    model: str  # "vit" or "resnet"
    width: int  # features of ViT's tokens, or channels of ResNet's first convolution
    depths: tuple[int, ...]  # blocks of each stage; a ViT has one stage
    heads: int = 0
    patch: int = 16
    side: int = 224
    eval_resize: int = 256  # shorter side before the center crop
    dtype: str = "bfloat16"  # of activations; parameters are float32
    batch: int = 1024  # global batch size
    # Group size of ghost batch normalization (Hoffer et al., 2017).
    virtual_batch_size: int = 0  # 0: the whole batch
    epochs: int = 300
    warmup_epochs: float = 10
    optimizer: str = "adamw"  # or "sgd", with Nesterov's momentum
    rate: float = 1e-3  # peak learning rate
    weight_decay: float = 0.05
    clip: float = 1.0  # maximum norm of gradients
    ema: float = 0.9999
    smoothing: float = 0.1
    jitter: float = 0.3  # strength for brightness, contrast and saturation
    policy: str = "rand"  # "rand", "auto" or "none"
    magnitude: int = 9
    erasing: float = 0.25
    mixup: float = 0.8  # parameter of the Beta distribution; 0 turns it off
    cutmix: float = 1.0

    def __post_init__(self) -> None:
        size = self.virtual_batch_size
        if self.batch < 1 or self.rate <= 0:
            raise ValueError(f"batch={self.batch} and rate={self.rate} must be above 0")
        if size < 0:
            raise ValueError(
                f"virtual_batch_size={size} must not be negative; 0 uses the whole batch"
            )
        if 0 < size < self.batch and self.batch % size:
            raise ValueError(f"batch={self.batch} must be a multiple of virtual_batch_size={size}")
