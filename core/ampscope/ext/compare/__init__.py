"""Precisions side by side on this machine, and the largest batch that fits in each.

`measure` is what the child processes do. `comparison`, `verdict` and `batches` are pure views over
the records that they wrote, without torch: ratios, whether losses differ, whether AMP pays, where
throughput levels off. `cli`, `report` and the pages in app.ext say it.
"""

from ampscope.extensions import Extension, Kind, Page

EXTENSION = Extension(
    docs="docs/hardware.md",
    commands={
        "compare": "ampscope.ext.compare.cli:compare",
        "batch-size": "ampscope.ext.compare.cli:batch_size",
    },
    pages=(
        Page("compare", "Compare", "compare_arrows", within="This machine", in_sidebar=True),
        Page("batch_size", "Batch size", "stacked_bar_chart", within="This machine"),
    ),
    kinds=(
        Kind(
            name="compare",
            title="Precisions compared on {what}",
            page="compare",
            measure="ampscope.ext.compare.measure.interleaved:measure",
            told="ampscope.ext.compare.report:comparison_told",
            gaps="ampscope.ext.compare.report:comparison_gaps",
            least_precisions=2,
        ),
        Kind(
            name="batch",
            title="Largest batch of {what}",
            page="batch_size",
            measure="ampscope.ext.compare.measure.batch_size:measure",
            told="ampscope.ext.compare.report:search_told",
            gaps="ampscope.ext.compare.report:search_gaps",
            least_precisions=1,
        ),
    ),
)
