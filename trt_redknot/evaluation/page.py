"""The report of an evaluation as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from trt_redknot.evaluation.charts import axis_charts
from trt_redknot.evaluation.summary import ALL, Summary
from trt_redknot.evaluation.tables import change, percent

_TEMPLATE = "evaluation.html.jinja"
# Pairs shown as text, those first whose arms differ most.
_SHOWN = 60


def render_evaluation(summary: Summary, title: str) -> str:
    """The page as HTML. All text is escaped; every table and figure names its class of evidence."""
    environment = Environment(
        loader=PackageLoader("trt_redknot.evaluation", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "change": change}
    pairs = sorted(summary.pairs, key=lambda pair: (pair.reuse.text == pair.recompute.text, -pair.kl))
    return environment.get_template(_TEMPLATE).render(
        title=title,
        summary=summary,
        overall=summary.overall(),
        details=[group for group in summary.groups if group.by != ALL],
        charts=[chart for axis in summary.axes for chart in axis_charts(summary, axis)],
        pairs=pairs[:_SHOWN],
        left_out=max(0, len(pairs) - _SHOWN),
    )
