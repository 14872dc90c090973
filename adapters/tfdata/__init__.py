"""tf.data: a DALI pipeline that replaces a ``tf.data.Dataset`` in JAX training code.

    from dalijax.adapters.tfdata import DALIDataset

    ds = DALIDataset(iterator_fn, batch_size=128).repeat().prefetch(2)
    for step, batch in zip(range(num_steps), ds):
        images = batch["images"].numpy()

Without TensorFlow, specs are jax.ShapeDtypeStructs, and ``tf.train.Checkpoint`` is not supported.
"""

from .dataset import DALIDataset as DALIDataset

__all__ = ["DALIDataset"]


def __dir__() -> list[str]:
    return sorted(__all__)
