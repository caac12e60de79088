"""The predictions of a data set of Ray Data, on many machines."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from service.bulk.input_files import rows_of
from service.bulk.output_files import add_row, result_arrays, result_columns
from service.bulk.predictor import Predictor
from service.bulk.rows import Outcome, Row
from service.bulk.run import compute


class RayPredictor:
    """An actor for `map_batches` with `batch_format="pyarrow"`: a table's rows, each with its result or its error.

    bundle, head, options, precision: see `Predictor`; the bundle is a path on each machine
    """

    def __init__(
        self,
        bundle: str,
        head: str | None = None,
        options: Mapping[str, Any] | None = None,
        precision: str = "auto",
    ) -> None:
        self._predictor = Predictor(Path(bundle), head, options, precision)
        self._runner = asyncio.Runner()
        self._runner.run(self._predictor.__aenter__())

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the table with the columns `result` and `error`, of which one is null. Raises DataError."""
        rows = rows_of(table.to_pylist(), "the data set", self._predictor.needs)
        done: list[tuple[Row, Outcome]] = []
        self._runner.run(compute(self._predictor, rows, lambda *one: add_row(done, *one)))
        names = result_columns(".parquet", table.column_names)
        for name, column in zip(
            names, result_arrays(pa, [found for _, found in done]), strict=True
        ):
            table = table.append_column(name, column)
        return table

    def close(self) -> None:
        """Close the bundle; Ray ends the process of an actor instead."""
        self._runner.run(self._predictor.__aexit__(None, None, None))
        self._runner.close()
