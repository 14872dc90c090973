"""A folder of images, and a graph over them."""

from nvidia.dali import fn, types
from page_data import draw_folder

from dalijax import data_iterator

draw_folder()


@data_iterator(
    output_map=["encoder_input", "decoder_loss_weights"], reader_name="reader", mask="mask"
)
def train(data_dir, shard_id=0, num_shards=1):
    jpegs, labels = fn.readers.file(
        file_root=data_dir, name="reader", shard_id=shard_id, num_shards=num_shards
    )
    images = fn.decoders.image(jpegs, device="cpu")
    weights = fn.cast(labels, dtype=types.FLOAT) * 0 + 1
    return fn.resize(images, size=(32, 32)), weights
