"""Dtypes in the forms of NumPy, JAX, DALI and text."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import types

from dalijax.core.arrays.dtypes import DALI_TYPES, as_bfloat16, as_dtype, dali_type, is_number
from dalijax.sources import Field


@pytest.mark.parametrize("dtype", DALI_TYPES, ids=str)
def test_every_form_means_the_same_dtype(dtype):
    name, dali = dtype.name, DALI_TYPES[dtype]
    for form in (dtype, name, dtype.type, dali, jnp.dtype(name)):
        assert as_dtype(form) == np.dtype(name), form
        assert dali_type(form) == dali, form
        assert Field(form).dtype == np.dtype(name), form


@pytest.mark.parametrize("form", ("bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)))
def test_bfloat16_is_a_dtype_that_dali_lacks(form):
    assert as_dtype(form) == jnp.bfloat16
    with pytest.raises(TypeError, match="out is bfloat16, which DALI does not support"):
        dali_type(form, "out")


@pytest.mark.parametrize(
    "value", (None, "float31", types.STRING, types.NO_TYPE, ("f4", "f4"), {}, 3.5, "half float")
)
def test_other_values_are_rejected_by_the_name_of_the_argument(value):
    with pytest.raises(TypeError, match="kind must be a dtype of NumPy, JAX or DALI"):
        as_dtype(value, "kind")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    (("bfloat16", True), ("int4", True), ("f4", True), ("?", True), ("O", False), ("U3", False)),
)
def test_numbers_are_told_from_text(dtype, expected):
    jnp.dtype("bfloat16")
    assert is_number(np.dtype(getattr(jnp, dtype, dtype))) is expected


def numbers():
    """Returns all kinds of float32: random bits, ties, subnormals, infinities and NaN."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    ties = (bits[:1024] & 0xFFFF0000) | 0x8000
    values = np.concatenate([bits, ties]).view(np.float32)
    return np.concatenate([values, np.float32([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38])])


@pytest.mark.parametrize("device", (None, 0, 2))
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_rounding_equals_jax_on_every_device(device, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        values = numbers().astype(dtype)
    expected = np.asarray(jnp.asarray(values).astype(jnp.bfloat16))
    array = values if device is None else jax.device_put(values, jax.devices()[device])
    result = as_bfloat16(array)
    assert result.dtype == jnp.bfloat16
    assert device is None or result.devices() == {jax.devices()[device]}
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(result, np.float32)), nan)
    np.testing.assert_array_equal(
        np.asarray(result)[~nan].view(np.uint16), expected[~nan].view(np.uint16)
    )


@pytest.mark.parametrize("device", (None, 0, 2))
def test_bits_of_bfloat16_keep_their_values(device):
    bits = np.arange(1 << 16, dtype=np.uint16)
    array = bits if device is None else jax.device_put(bits, jax.devices()[device])
    result = as_bfloat16(array)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(result).view(np.uint16), bits)


def test_the_callers_mesh_and_guards_do_not_matter():
    array = jax.device_put(np.float32([[1.5, 2.7]]), jax.devices()[3])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    set_mesh = getattr(jax, "set_mesh", contextlib.nullcontext)  # of JAX 0.6 and later
    with set_mesh(mesh), jax.transfer_guard("disallow"), jax.default_device(jax.devices()[1]):
        result = as_bfloat16(array)
    assert result.devices() == {jax.devices()[3]}
    assert result.dtype == jnp.bfloat16
