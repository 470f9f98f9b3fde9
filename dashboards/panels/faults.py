"""What should be zero. Failed loads and lost events stand with what they spoil."""

from __future__ import annotations

from typing import Final

from dashboards.panel import Panel, Query, Row
from dashboards.promql import grown, latest

__all__ = ["FAULTS"]

FAULTS: Final = Row(
    title="What should be zero",
    panels=(
        Panel(
            title="Accounting errors by invariant",
            description=(
                "Checks that found an invariant of the counts violated: how many within the length of time shown, up "
                "to each moment. Anything but 0 is a bug of aiokv: keep the audit, report the invariant, restart the "
                "instance."
            ),
            queries=(Query(expr=grown("aiokv_accounting_errors_total", by=("invariant",)), legend="{{invariant}}"),),
            axis="errors",
        ),
        Panel(
            title="Corrupt blocks",
            description=(
                "Blocks of the CPU tier that a load found changed, counted likewise. They are computed again, never "
                "served. Anything but 0 is bad memory, or something that writes where it should not."
            ),
            queries=(Query(expr=grown("aiokv_corrupt_blocks_total"), legend="corrupt"),),
            axis="blocks",
        ),
        Panel(
            title="Orphaned blocks",
            description=(
                "Blocks that a copy may still write although all who wanted it have left, and those in quarantine. It "
                "should fall back to 0; one that only rises is capacity that is lost."
            ),
            queries=(Query(expr=latest("aiokv_orphan_buffers", by=("tier",)), legend="{{tier}}"),),
            axis="blocks",
        ),
    ),
)
