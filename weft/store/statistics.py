"""What runs of workflows measured of their operators, for the plans of later runs, by tenant, operator and model.

Owns how much of it is kept: the operators of a tenant that no run has used for longest go first. Figures are opaque.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from sqlalchemy import Connection, bindparam, delete, func, select

from weft.store.database import Database
from weft.store.schema import operator_statistics
from weft.store.sqlite import upsert

MAX_OPERATORS = 10_000
"""Of a tenant."""
_row = operator_statistics.c
_OF = (_row.tenant == bindparam("of_tenant"), _row.model == bindparam("of_model"))
_GET = select(_row.figures).where(*_OF, _row.operator == bindparam("of_operator"))
_PUT = upsert(operator_statistics)
_LAST = select(func.max(_row.used)).where(_row.tenant == bindparam("of_tenant"))
_COUNT = select(func.count()).select_from(operator_statistics).where(_row.tenant == bindparam("of_tenant"))
_OLDEST = (
    select(_row.operator, _row.model)
    .where(_row.tenant == bindparam("of_tenant"))
    .order_by(_row.used, _row.operator, _row.model)
)
_DELETE = delete(operator_statistics).where(*_OF, _row.operator == bindparam("of_operator"))


class StatisticsTable:
    """The figures of a database. Used from any thread. Every method raises `StorageFailed`."""

    def __init__(self, database: Database, max_operators: int = MAX_OPERATORS):
        """`max_operators` of each tenant are kept."""
        self._database = database
        self._max_operators = max_operators

    def get(self, tenant: str, model: str, operators: Iterable[str]) -> dict[str, bytes]:
        """The figures of those operators that are known. Blocks."""

        def work(connection: Connection) -> dict[str, bytes]:
            this = {"of_tenant": tenant, "of_model": model}
            found = {name: connection.execute(_GET, {**this, "of_operator": name}).scalar() for name in operators}
            return {name: figures for name, figures in found.items() if figures is not None}

        return self._database.read(work)

    def put(self, tenant: str, model: str, figures: Mapping[str, bytes]) -> Future[None]:
        """Keep figures by operator, in place of those before. The future is done after the commit."""

        def work(connection: Connection) -> None:
            this = {"of_tenant": tenant}
            used = 1 + (connection.execute(_LAST, this).scalar() or 0)
            row = {"tenant": tenant, "model": model, "used": used}
            for operator, content in figures.items():
                connection.execute(_PUT, {**row, "operator": operator, "figures": content})
            too_many = int(connection.execute(_COUNT, this).scalar() or 0) - self._max_operators
            if too_many > 0:
                for operator, of_model in connection.execute(_OLDEST.limit(too_many), this).all():
                    connection.execute(_DELETE, {**this, "of_model": of_model, "of_operator": operator})

        return self._database.write(work, tenant)
