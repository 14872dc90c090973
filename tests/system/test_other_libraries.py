"""Names of other libraries: an error names the replacement."""

import pytest
from mistakes import BATCH, NUMBERS, check, grain_records, open_numbers, same, take

import dalijax
from dalijax import augment, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALITransform

# By replacement: arguments of other libraries, and their values.
ARGUMENTS = {
    "drop_remainder=True": {"drop_last": True},
    "stream(num_epochs": {"num_epochs": 3, "epochs": 3},
    "stream(": {"repeat": True},
    "prefetch_queue_depth": {"prefetch": 4, "prefetch_factor": 4, "prefetch_size": 4},
    "shuffle=True": {"shuffle_buffer_size": 1000, "shuffle_buffer": 1000},
    "num_threads": {
        "num_workers": 4,
        "workers": 4,
        "num_parallel_calls": 4,
        "num_thread": 2,
        "num_treads": 2,
        "threads": 2,
    },
    "omit it": {"pin_memory": True, "persistent_workers": True, "cache": True},
    "in the graph function": {"collate_fn": print, "transform": print},
    "batch_size": {"batch": 4, "bs": 4, "bach_size": 2},
    "sharding": {"mesh": None},
    "device_id": {"device": "cpu"},
    "source": {"dataset": None, "path": "x", "root": "x"},
    "seek_step(n)": {"start_step": 5},
    "itertools.islice(": {"num_steps": 5},
    "seed": {"rng": 0, "key": 0},
    "shuffle": {"shufle": 2},
    "output_map": {"outputs": ["x"], "output_names": ["x"]},
}
# By owner: attributes of other libraries, and their replacements.
ATTRIBUTES = {
    "iterator": {
        "stream": "use stream(...) of the iterator function",
        "take": "itertools.islice",
        "map": "in the graph function",
        "filter": "sources.Selection",
        "shuffle": "shuffle=True",
        "state_dict": "get_state()",
        "load_state_dict": "set_state(state)",
        "save": "get_state()",
        "restore": "set_state(state)",
        "load": "set_state(state)",
        "repeat": "stream(",
        "batch": "batch_size=",
        "prefetch": "prefetch_queue_depth=",
        "cache": "operating system",
        "shard": "sharding=",
        "enumerate": "enumerate(iterator)",
        "as_numpy_iterator": "as_numpy=True",
        "cardinality": "len(iterator)",
        "num_batches": "len(iterator)",
        "get_next": "next(iterator)",
        "spec": "element_spec",
        "set_epoch": "seek(epoch)",
    },
    "stream": {
        "epochs": "num_epochs= of stream(...)",
        "take": "itertools.islice",
        "state_dict": "get_state()",
        "seek": "seek_step(step)",
    },
    "augment": {
        "Normalize": "normalize",
        "mixup": "jax_function",
        "MixUp": "jax_function",
        "cutmix": "jax_function",
        "RandomResizedCrop": "random_resized_crop",
        "ColorJitter": "color_jitter",
        "RandAugment": "rand_augment",
        "randaugment": "rand_augment",
        "AutoAugment": "auto_augment",
        "TrivialAugmentWide": "trivial_augment",
        "CenterCrop": "center_crop",
        "RandomErasing": "random_erasing",
        "ToTensor": "jax.Array",
        "Resize": "fn.resize",
        "RandomHorizontalFlip": "flip",
        "horizontal_flip": "flip",
        "RandomRotation": "fn.rotate",
        "GaussianBlur": "use gaussian_blur",
        "RandomGrayscale": "use grayscale",
        "RandomSolarize": "use solarize",
        "RandomApply": "probability=",
        "RandomIoUCrop": "use iou_window",
        "ScaleJitter": "use scale_window",
        "RandomShortestSize": "use fit_window",
        "RandomAffine": "use affine_window",
        "SanitizeBoundingBoxes": "window.boxes",
        "ToDtype": "normalize",
        "Compose": "one after another",
        "color_jiter": "color_jitter",
    },
    "sources": {
        "ImageFolder": "Files",
        "DatasetFolder": "Files",
        "WebDataset": "Tar",
        "TarDataset": "Tar",
        "TFRecordDataset": "TFRecord",
        "TFRecords": "TFRecord",
        "RLDSDataset": "RLDS",
        "HuggingFace": "Records",
        "ArrayRecord": "Records",
        "TFDS": "Records",
        "ParquetIterDataset": "Parquet",
        "parquet": "Parquet",
        "Numpy": "Arrays",
        "TensorDataset": "Arrays",
        "ConcatDataset": "Mixture",
        "files": "Files",
        "tar": "Tar",
    },
    "source": {
        "shuffle": "shuffle=True",
        "take": "Selection",
    },
    "batches": {
        "shuffle": "MapDataset before the transform",
        "repeat": "MapDataset before the transform",
    },
    "clu": {
        "state_dict": "save(file)",
        "take": "itertools.islice",
    },
    "dalijax": {
        "Files": "dalijax.sources.Files",
        "DALITransform": "dalijax.adapters.grain",
        "DALIDataset": "dalijax.adapters.tfdata",
        "random_resized_crop": "dalijax.augment.random_resized_crop",
        "jax_function": "dalijax.fn.jax_function",
        "DataLoader": "data_iterator",
    },
}
OWNERS = {
    "augment": augment,
    "sources": sources,
    "dalijax": dalijax,
    "source": NUMBERS,
    "batches": grain_records().pipe(DALITransform(same, batch_size=2, output_map=["x"])),
    "clu": DALIDatasetIterator(take, source=NUMBERS, batch_size=BATCH),
}


@pytest.mark.parametrize("cure", ARGUMENTS)
def test_arguments_of_other_libraries(cure):
    for name, value in ARGUMENTS[cure].items():
        check(lambda _: open_numbers(**{name: value}), TypeError, [name, cure])


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_attributes_of_other_libraries(owner):
    with open_numbers() as iterator, take.stream(source=NUMBERS, batch_size=2) as stream:
        of = {**OWNERS, "iterator": iterator, "stream": stream}[owner]
        for name, cure in ATTRIBUTES[owner].items():
            check(lambda _: getattr(of, name), AttributeError, [name, cure])
