"""`Map`: a source whose records a Python function changes, in the reading threads."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.field import Field
from ..messages.printable import printable_repr, printable_text
from ..order.shuffle import Indices
from ..random.hashing import Bits, fold
from ..random.record_generators import RecordGenerators
from .field_names import check_options
from .labels import WITH_CLASSES
from .record_function import RecordFunction
from .reuse import ReuseCheck
from .source import (
    MapFunction,
    Source,
    SourceFault,
    Values,
    checked_columns,
    is_of_record,
    map_classes,
    mapped_fields,
    maps_of,
    read_records,
)
from .values import UnfitValueError, fitted, infer_kind, leaf
from .wrapper import Wrapper

_MISSING = object()
_MOST_TRIED = 8  # first records, which determine the kinds of the fields


class Map(Wrapper):
    """A source of the records that a function returns; see `Source.map` and `Source.random_map`.

    Args:
        source: The other source.
        function: The function of a record, or of a record and a generator.
        inputs: The fields that the function takes and replaces; None: all.
        fields: The kinds of the returned fields; None: they are those of the first records.
        stateful: Whether the function keeps state; None: it is checked.
        is_random: Whether the function takes a generator.

    Raises:
        TypeError, ValueError: See `Source.map`.
    """

    def __init__(
        self,
        source: Source,
        function: Callable[..., Any],
        *,
        inputs: Sequence[str] | None = None,
        fields: Mapping[str, Field] | None = None,
        stateful: bool | None = None,
        is_random: bool = False,
    ):
        super().__init__(source)
        if isinstance(inputs, str):
            raise TypeError(f"inputs must be a list of names of fields, such as [{inputs!r}]")
        check_options({"inputs": dict.fromkeys(inputs or ())}, source.fields)
        if fields is not None:
            check_options({"fields": fields}, fields)
        self._inputs = tuple(source.fields if inputs is None else dict.fromkeys(inputs))
        before = [inner for _, inner in maps_of(source)]
        self._function = RecordFunction(
            function,
            is_random,
            1 + max((inner.depth for inner in before), default=-1),
            1 + max((inner.place for inner in before if inner.is_random), default=-1),
            stateful,
        )
        self._reuse = None if super()._gives_new_arrays else ReuseCheck(source)
        self._has_given_kinds = fields is not None
        # By field, the sizes of the dimensions after the first, for lists without elements.
        self._sizes_of_empty: dict[str, tuple[int, ...]] = {}
        self._unchanged = set[str]()  # the fields that the function returns as they are
        self._outputs = dict(self._learned() if fields is None else fields)
        unmapped = {k: f for k, f in source.fields.items() if k not in self._inputs}
        if both := sorted(unmapped.keys() & self._outputs.keys()):
            raise ValueError(
                f"{self._function.label} returns {both}, which are fields of the source, but not "
                f"in inputs={list(self._inputs)}. Add them to inputs, or return other names"
            )
        self.fields = {**unmapped, **self._outputs}

    def __repr__(self) -> str:
        return f"{self._source!r}.{self._function.label}"

    def _names_in_source(self, names: Sequence[str]) -> list[str]:
        unmapped = [name for name in names if name not in self._outputs]
        if len(unmapped) == len(names):
            return unmapped
        return [*dict.fromkeys([*unmapped, *self._inputs])]

    def _read_keyed(
        self, indices: Indices, names: Sequence[str], keys: Bits | None
    ) -> tuple[dict[str, Values], dict[int, Exception]]:
        columns, errors = super()._read_keyed(indices, names, keys)
        outputs = [name for name in names if name in self._outputs]
        if not outputs:
            return columns, errors
        try:
            inner_names = self._names_in_source(names)
            columns = checked_columns(self._source, len(indices), inner_names, columns)
        except (TypeError, ValueError) as error:
            raise SourceFault(str(error)) from error
        if self._reuse is not None:  # the values of the function may have memory of their own
            self._reuse.check(indices, columns, keys)
        call = functools.partial(self._call, columns, self._generators(keys))
        rows = [row for row in range(len(indices)) if row not in errors]
        if rows and not self._function.is_compared:
            try:
                self._function.compare(functools.partial(call, rows[0]))
            except Exception as error:
                if not is_of_record(error):
                    raise

        def results() -> dict[str, Any]:
            return self._results(indices, rows, outputs, call, errors)

        unmapped = {name: columns[name] for name in names if name not in self._outputs}
        return {**unmapped, **self._function.watch(results)}, errors

    def _results(
        self,
        indices: Indices,
        rows: Sequence[int],
        outputs: Sequence[str],
        call: Callable[[int], Mapping[str, Any]],
        errors: dict[int, Exception],
    ) -> dict[str, Any]:
        """Returns fields of the function's results; adds the errors of rows to ``errors``."""
        results: dict[str, Any] = {name: [None] * len(indices) for name in outputs}
        for row in rows:
            try:
                returned = call(row)
                self._check_names_of(returned)
                for name in outputs:
                    results[name][row] = self._converted(name, returned[name])
            except SourceFault as error:
                name = printable_text(self._source.name(int(indices[row])))
                raise SourceFault(f"{error} ({name})") from error
            except Exception as error:
                if not is_of_record(error):
                    raise
                errors[row] = error
        for name, values in results.items():
            field = self._outputs[name]
            if field.dtype is not None and field.ndim == 0 and not errors:
                results[name] = np.array(values, field.dtype)  # one input, not one for each row
        return results

    def _call(
        self, columns: Mapping[str, Values], generators: RecordGenerators | None, row: int
    ) -> Any:
        """Returns the function's result for a row."""
        return self._called(self._record(columns, row), generators, row)

    def _called(self, record: dict[str, Any], generators: RecordGenerators | None, row: int) -> Any:
        if generators is None:
            return self._function(record)
        return self._function(record, generators.of_row(row))

    def _record(self, columns: Mapping[str, Values], row: int) -> dict[str, Any]:
        fields = self._source.fields
        return {name: _shown(columns[name][row], fields[name].is_path) for name in self._inputs}

    def _generators(self, keys: Bits | None) -> RecordGenerators | None:
        """Returns the generators of rows, given their keys; None for a map that is not random.

        Raises:
            SourceFault: If there are no keys.
        """
        if not self._function.is_random:
            return None
        if keys is None:
            raise SourceFault(
                f"read() of {self._function.label} knows neither the seed nor the epoch. Pass the "
                "source to an iterator. If your own source reads it, call random_map() of that "
                "source instead"
            )
        return RecordGenerators(keys, self._function.place)

    def _check_names_of(self, returned: Mapping[str, Any]) -> None:
        if returned.keys() != self._outputs.keys():
            raise SourceFault(
                f"{self._function.label} returned the fields {sorted(map(str, returned))}, but "
                f"other records have {sorted(self._outputs)}. Return the same fields for every "
                "record"
            )

    def _converted(self, name: str, value: Any) -> Any:
        """Returns a value converted to the kind of its field.

        Raises:
            ValueError: If the value is of another kind.
        """
        field = self._outputs[name]
        if field.dtype is None:
            return value
        if type(value) is np.ndarray:  # a shortcut, which saves 2 us
            is_plain = value.dtype == field.dtype and value.flags.c_contiguous
            if is_plain and value.ndim == field.ndim:
                return value
        elif isinstance(value, np.generic) and field.ndim == 0 and value.dtype == field.dtype:
            return value
        label = self._function.label
        try:
            array = leaf(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{label} returned {name!r}, but it can't be used: {error}") from error
        try:
            casts = self._has_given_kinds or array.ndim == field.ndim == 0
            return fitted(value, array, field, self._sizes_of_empty.get(name, ()), casts)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{label} returned {name!r}, which {error}") from error

    def _learned(self) -> dict[str, Field]:
        """Returns the kinds of the fields that the function returns for the first records."""
        results = iter(self._first_results())
        first_results = [next(results)]
        for name in first_results[0]:
            if not isinstance(name, str) or not name:
                raise TypeError(
                    f"{self._function.label} returned {printable_repr(name)} as the name of a "
                    "field. Use strings"
                )

        def values(name: str) -> Iterator[Any]:
            """Yields a field of the first results; calls the function only if they are needed."""
            for number in range(_MOST_TRIED):
                if number == len(first_results):
                    result = next(results, None)
                    if result is None:
                        return
                    first_results.append(result)
                yield first_results[number].get(name)

        kinds: dict[str, Field] = {}
        for name in first_results[0]:
            before = self._source.fields[name] if name in self._inputs else Field(None)
            if name in self._unchanged:
                kinds[name] = dataclasses.replace(before, is_path=False)
                continue
            try:
                kind, self._sizes_of_empty[name] = infer_kind(None, (), values(name))
            except UnfitValueError as error:
                label = self._function.label
                raise ValueError(f"{label} returned {name!r}, but {error}") from error
            kinds[name] = dataclasses.replace(kind, bypass=before.bypass)
        return kinds

    def _first_results(self) -> Iterator[Mapping[str, Any]]:
        """Yields the function's results for the first good records.

        Raises:
            ValueError: If none of the records that are tried is good.
        """
        last: Exception | None = None
        count = min(len(self._source), _MOST_TRIED)
        for index in range(count):
            try:
                result = self._result_of(index)
            except Exception as error:
                if not is_of_record(error):
                    raise
                last = error
            else:
                yield result
        if not self._function.is_compared:
            raise ValueError(
                f"{self._function.label}: none of the first {count} records is good, so that the "
                f"kinds of the returned fields are unknown. Pass fields=, or repair them. {last}"
            ) from last

    def _result_of(self, index: int) -> Mapping[str, Any]:
        """Returns the function's result for a record; compares two results of the first record."""
        number = np.array([index], np.int64)
        keys = fold(0, 0, number)
        columns, errors = read_records(self._source, number, self._inputs, keys)
        if errors:
            raise errors[0]
        columns = checked_columns(self._source, 1, self._inputs, columns)
        generators = self._generators(keys)
        records: list[dict[str, Any]] = []

        def call() -> Any:
            records.append(self._record(columns, 0))
            return self._called(dict(records[-1]), generators, 0)  # it may change its dict

        if self._function.is_compared:
            return call()
        result = self._function.compare(call)
        self._unchanged = {
            name for name, value in records[0].items() if result.get(name, _MISSING) is value
        }
        return result

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Returns heights and widths of images; see `dalijax.sources.Source`."""
        if name in self._outputs:
            # From the bytes of each image: an image may differ from that of an earlier read.
            return Source.sizes(self, indices, name, data)
        return super().sizes(indices, name, data)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of the other source, unless the function returns other labels."""
        if WITH_CLASSES & {*self._outputs} - {*self._unchanged}:
            raise AttributeError("classes")
        return super().classes

    @property
    def _gives_new_arrays(self) -> bool:
        return False  # the function may reuse memory

    @property
    def _maps(self) -> list[tuple[str, MapFunction]]:
        return [*maps_of(self._source), ("", self._function)]

    @property
    def _mapped_fields(self) -> frozenset[str]:
        return (mapped_fields(self._source) - {*self._inputs}) | self._outputs.keys()


def _shown(value: Any, is_path: bool) -> Any:
    """Returns a value as the function receives it: contents of files, and read-only arrays."""
    if is_path:
        value = np.fromfile(os.fsdecode(bytes(value).rstrip(b"\0")), np.uint8)
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.view()  # the source, or other rows, may use the memory
        value.flags.writeable = False
    return value


map_classes.append(Map)
